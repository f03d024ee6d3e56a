// The C interface of Baton's CPU kernels. Python fills these structs through ctypes (engine/attention/native_library.py
// mirrors them field by field), so they hold plain numbers and pointers only, and change together with that file.
//
// Axes: T tokens of the step, S sequences of the step, H query heads, K key/value heads, D head dimension.
// Strides count elements, not bytes.
#ifndef BATON_KERNELS_H
#define BATON_KERNELS_H

#include <cstdint>

#define BATON_EXPORT __attribute__((visibility("default")))

extern "C" {

enum BatonDtype : int32_t { BATON_FLOAT32 = 0, BATON_BFLOAT16 = 1 };

// Instruction sets that kernels are compiled for, worst first. Which exist is a property of the build, which run of
// the machine: ask baton_isa_supported.
enum BatonIsa : int32_t { BATON_GENERIC = 0, BATON_AVX2 = 1, BATON_AVX512 = 2, BATON_AVX512_BF16 = 3, BATON_NUM_ISAS = 4 };

// One layer of the block pool. The key of (block b, kv head k, slot s) begins at
// data + b * block_stride + k * head_stride + s * slot_stride, its value kv_stride further on.
struct BatonKVLayer {
  void* data;
  int64_t block_stride;
  int64_t head_stride;
  int64_t kv_stride;
  int64_t slot_stride;
  int32_t num_kv_heads;
  int32_t block_size;
  int32_t head_dim;
  int32_t dtype;
};

// Attention of S sequences. Tokens query_starts[s] .. query_starts[s + 1] - 1 belong to sequence s and stand at its
// positions context_starts[s], context_starts[s] + 1, ...; each sees the positions up to its own. Their keys and values
// are in the pool already, through the block ids block_tables[table_starts[s] ...].
struct BatonAttention {
  BatonKVLayer kv;
  const void* q;  // [T, H, D], heads contiguous
  void* out;      // [T, H, D], heads contiguous
  const int32_t* query_starts;    // [S + 1]
  const int32_t* context_starts;  // [S]
  const int32_t* table_starts;    // [S]
  const int32_t* block_tables;
  int64_t q_token_stride;
  int64_t out_token_stride;
  int32_t num_sequences;
  int32_t num_heads;
  float scale;
};

// Rotates queries (in place) and keys of the fused projection qkv [T, (H + 2K) * D], and writes keys and values to the
// pool at `slots`. cos_sin is [positions, D]: D/2 cosines, then D/2 sines.
struct BatonRotaryWrite {
  BatonKVLayer kv;
  void* qkv;
  const float* cos_sin;
  const int64_t* positions;  // [T]
  const int64_t* slots;      // [T]
  int64_t token_stride;
  int32_t num_tokens;
  int32_t num_heads;
};

// residual [T, size] += x [T, size] where x is given; then out = residual / rms(residual) * weight. The residual is
// float32, the others are of `dtype`.
struct BatonRmsNorm {
  const void* x;
  float* residual;
  const void* weight;
  void* out;
  int32_t num_tokens;
  int32_t size;
  int32_t dtype;
  float eps;
};

// out [T, size] = silu(gate_up[:, :size]) * gate_up[:, size:].
struct BatonSiluMul {
  const void* gate_up;
  void* out;
  int32_t num_tokens;
  int32_t size;
  int32_t dtype;
};

// out [N, vocab_size] = x weight^T, float32 from bfloat16. The sum of each output is taken in one order: its bits do not
// depend on the other rows.
struct BatonLogits {
  const void* x;       // [N, size]
  const void* weight;  // [vocab_size, size]
  float* out;
  int32_t num_rows;
  int32_t size;
  int32_t vocab_size;
};

// 1 if this build has kernels for `isa` and this machine can run them.
BATON_EXPORT int32_t baton_isa_supported(int32_t isa);

// The work is split over at most num_threads threads, the caller's included.
BATON_EXPORT void baton_attention(const BatonAttention* args, int32_t isa, int32_t num_threads);
BATON_EXPORT void baton_rotary_write(const BatonRotaryWrite* args, int32_t isa, int32_t num_threads);
BATON_EXPORT void baton_rms_norm(const BatonRmsNorm* args, int32_t isa, int32_t num_threads);
BATON_EXPORT void baton_silu_mul(const BatonSiluMul* args, int32_t isa, int32_t num_threads);
BATON_EXPORT void baton_logits(const BatonLogits* args, int32_t isa, int32_t num_threads);

}  // extern "C"

#endif
