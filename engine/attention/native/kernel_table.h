// What each instruction set's translation unit provides.
#ifndef BATON_KERNEL_TABLE_H
#define BATON_KERNEL_TABLE_H

#include <cstddef>

#include "kernels.h"

namespace baton {

// The query rows of one attention work item: tokens [begin, end) of sequence `sequence`, and the heads of `kv_head`.
struct AttentionTile {
  int32_t sequence;
  int32_t kv_head;
  int32_t begin;
  int32_t end;
};

// `scratch` is memory of the calling thread of at least so many bytes as the operation's scratch_size_bytes function
// says, 64-byte aligned. Row ranges are [begin, end).
struct KernelTable {
  // A product is cut into items, for so many threads, that may be computed in any order and at once. None if there are
  // no rows.
  int64_t (*linear_num_items)(const BatonLinear& args, int num_threads);
  size_t (*linear_scratch_size_bytes)(const BatonLinear& args, int num_threads);
  void (*linear_item)(const BatonLinear& args, int num_threads, int64_t item, void* scratch);

  size_t (*attention_scratch_size_bytes)(const BatonAttention& args);
  int32_t (*attention_tile_tokens)(const BatonAttention& args);
  // `next` is the tile that this thread probably takes next, or null: its first keys are fetched ahead.
  void (*attention_tile)(const BatonAttention& args, const BatonStep& step, const AttentionTile& tile,
                         const AttentionTile* next, void* scratch);

  void (*embed)(const BatonEmbed& args, const BatonStep& step, int32_t begin, int32_t end);
  void (*add_norm)(const BatonAddNorm& args, int32_t begin, int32_t end);
  void (*rotary_write)(const BatonRotaryWrite& args, const BatonStep& step, int32_t begin, int32_t end);
  void (*argmax)(const BatonArgmax& args, int32_t begin, int32_t end);
};

#ifdef BATON_HAVE_X86
namespace avx512_bf16 { extern const KernelTable table; }
namespace avx512 { extern const KernelTable table; }
namespace avx2 { extern const KernelTable table; }
#endif
namespace generic { extern const KernelTable table; }

}  // namespace baton

#endif
