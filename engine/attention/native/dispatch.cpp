// The C entry points: choose the instruction set's kernels and split the work over threads.
#include <vector>

#include "kernel_table.h"
#include "kernels.h"
#include "thread_pool.h"

namespace baton {
namespace {

constexpr int TOKENS_PER_ITEM = 32;    // of the elementwise kernels: a few microseconds of work
constexpr int LOGITS_PER_ITEM = 256;  // of each row: some ten microseconds of reading weights

const KernelTable& table_of(int32_t isa) {
  switch (isa) {
#ifdef BATON_HAVE_X86
    case BATON_AVX512_BF16: return avx512_bf16::table;
    case BATON_AVX512: return avx512::table;
    case BATON_AVX2: return avx2::table;
#endif
    default: return generic::table;
  }
}

// Calls kernel(args, begin, end) for pieces of 0 .. size - 1.
template <class Args>
void split(const Args& args, void (*kernel)(const Args&, int32_t, int32_t), int32_t size, int32_t size_per_item,
           int32_t num_threads) {
  struct Context {
    const Args& args;
    void (*kernel)(const Args&, int32_t, int32_t);
    int32_t size;
    int32_t size_per_item;
  } context{args, kernel, size, size_per_item};
  const int64_t num_items = (size + size_per_item - 1) / size_per_item;
  parallel_for(num_items, num_threads, [](void* opaque, int64_t item) {
    const Context& c = *static_cast<Context*>(opaque);
    const int32_t begin = (int32_t)item * c.size_per_item;
    const int32_t end = begin + c.size_per_item;
    c.kernel(c.args, begin, end < c.size ? end : c.size);
  }, &context);
}

// Last query tile first: with causal attention it is the longest, and long items must not come last.
std::vector<AttentionTile> plan_attention(const BatonAttention& args, int32_t tile_tokens) {
  std::vector<AttentionTile> tiles;
  for (int32_t sequence = 0; sequence < args.num_sequences; ++sequence) {
    const int32_t num_tokens = args.query_starts[sequence + 1] - args.query_starts[sequence];
    const int32_t num_tiles = (num_tokens + tile_tokens - 1) / tile_tokens;
    for (int32_t kv_head = 0; kv_head < args.kv.num_kv_heads; ++kv_head) {
      for (int32_t tile = num_tiles - 1; tile >= 0; --tile) {
        const int32_t begin = tile * tile_tokens;
        const int32_t end = begin + tile_tokens;
        tiles.push_back({sequence, kv_head, begin, end < num_tokens ? end : num_tokens});
      }
    }
  }
  return tiles;
}

}  // namespace
}  // namespace baton

extern "C" {

int32_t baton_isa_supported(int32_t isa) {
  if (isa == BATON_GENERIC) return 1;
#ifdef BATON_HAVE_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (isa == BATON_AVX2) return avx2;
  if (isa == BATON_AVX512) return avx512;
  if (isa == BATON_AVX512_BF16) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  return 0;
}

void baton_attention(const BatonAttention* args, int32_t isa, int32_t num_threads) {
  using namespace baton;
  const KernelTable& table = table_of(isa);
  struct Context {
    const BatonAttention& args;
    const KernelTable& table;
    const std::vector<AttentionTile> tiles;
    const size_t scratch_size_bytes;
  } context{*args, table, plan_attention(*args, table.attention_tile_tokens(*args)),
            table.attention_scratch_size_bytes(*args)};
  parallel_for((int64_t)context.tiles.size(), num_threads, [](void* opaque, int64_t item) {
    const Context& c = *static_cast<Context*>(opaque);
    const AttentionTile* next = item + 1 < (int64_t)c.tiles.size() ? &c.tiles[item + 1] : nullptr;
    c.table.attention_tile(c.args, c.tiles[item], next, thread_scratch(c.scratch_size_bytes));
  }, &context);
}

void baton_rotary_write(const BatonRotaryWrite* args, int32_t isa, int32_t num_threads) {
  baton::split(*args, baton::table_of(isa).rotary_write, args->num_tokens, baton::TOKENS_PER_ITEM, num_threads);
}

void baton_rms_norm(const BatonRmsNorm* args, int32_t isa, int32_t num_threads) {
  baton::split(*args, baton::table_of(isa).rms_norm, args->num_tokens, baton::TOKENS_PER_ITEM, num_threads);
}

void baton_silu_mul(const BatonSiluMul* args, int32_t isa, int32_t num_threads) {
  baton::split(*args, baton::table_of(isa).silu_mul, args->num_tokens, baton::TOKENS_PER_ITEM, num_threads);
}

void baton_logits(const BatonLogits* args, int32_t isa, int32_t num_threads) {
  baton::split(*args, baton::table_of(isa).logits, args->vocab_size, baton::LOGITS_PER_ITEM, num_threads);
}

}  // extern "C"
