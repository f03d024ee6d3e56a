// What each instruction set's translation unit provides to the dispatcher.
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

struct KernelTable {
  size_t (*attention_scratch_size_bytes)(const BatonAttention& args);
  int32_t (*attention_tile_tokens)(const BatonAttention& args);
  // `next` is the tile that this thread probably takes next, or null: its first keys are fetched ahead.
  void (*attention_tile)(const BatonAttention& args, const AttentionTile& tile, const AttentionTile* next,
                         void* scratch);
  void (*rotary_write)(const BatonRotaryWrite& args, int32_t begin, int32_t end);
  void (*rms_norm)(const BatonRmsNorm& args, int32_t begin, int32_t end);
  void (*silu_mul)(const BatonSiluMul& args, int32_t begin, int32_t end);
  // Columns [begin, end) of the output: of the vocabulary, not of the rows.
  void (*logits)(const BatonLogits& args, int32_t begin, int32_t end);
};

#ifdef BATON_HAVE_X86
namespace avx512_bf16 { extern const KernelTable table; }
namespace avx512 { extern const KernelTable table; }
namespace avx2 { extern const KernelTable table; }
#endif
namespace generic { extern const KernelTable table; }

}  // namespace baton

#endif
