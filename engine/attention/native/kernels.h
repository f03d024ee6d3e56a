// The C interface of Baton's CPU kernels. Python fills these structs through ctypes (engine/attention/native_structs.py
// mirrors them field by field), so they hold plain numbers and pointers only, and change together with that file.
//
// What a step computes is a program: a list of operations, each a kind and a struct of its arguments. Programs are made
// once and run again and again; what differs between steps stands in BatonStep, which the arguments point into.
//
// Axes: T tokens of the step, R rows whose logits are wanted, N rows of either kind, S sequences of the step, H query
// heads, K key/value heads, D head dimension. Strides count elements, not bytes, unless their name says so.
#ifndef BATON_KERNELS_H
#define BATON_KERNELS_H

#include <cstdint>

#define BATON_EXPORT __attribute__((visibility("default")))

extern "C" {

enum BatonDtype : int32_t { BATON_FLOAT32 = 0, BATON_BFLOAT16 = 1 };

// Instruction sets that kernels are compiled for. Which exist is a property of the build, which run of the machine: ask
// baton_isa_supported. BATON_AVX512_MIXED multiplies weights as BATON_AVX512 does, and is BATON_AVX512_BF16 in all else.
enum BatonIsa : int32_t {
  BATON_GENERIC = 0,
  BATON_AVX2 = 1,
  BATON_AVX512 = 2,
  BATON_AVX512_BF16 = 3,
  BATON_AMX = 4,
  BATON_AVX512_MIXED = 5,
};

// One step's tokens: engine.attention.batch.StepBatch, whose names these are.
struct BatonStep {
  const int64_t* ids;             // [T]
  const int64_t* positions;       // [T]
  const int64_t* slots;           // [T]
  const int32_t* query_starts;    // [S + 1]
  const int32_t* context_starts;  // [S]
  const int32_t* table_starts;    // [S]
  const int32_t* block_tables;
  const int64_t* rows;  // [R]
  int32_t num_tokens;
  int32_t num_selected;
  int32_t num_sequences;
};

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

// residual [T, size] = table[ids] * scale.
struct BatonEmbed {
  const void* table;  // [V, size]
  float* residual;
  int32_t size;
  int32_t dtype;  // of the table
  float scale;
};

// target[r] = source[rows[r]] for r < R (select), or target[rows[r]] = source[r] (place); rows of row_size_bytes.
struct BatonSelectRows {
  const void* source;
  void* target;
  int64_t source_stride_bytes;
  int64_t target_stride_bytes;
  int64_t row_size_bytes;
};

// residual [N, size] += x, or += x / rms(x) * x_norm; then out = residual / rms(residual) * norm. Norms and residual are
// float32, x and out are of `dtype`.
struct BatonAddNorm {
  const int32_t* num_rows;
  const void* x;        // or null
  const float* x_norm;  // or null
  float* residual;
  const float* norm;
  void* out;
  int32_t size;
  int32_t dtype;
  float eps;
};

enum BatonActivation : int32_t { BATON_NO_ACTIVATION = 0, BATON_SILU = 1, BATON_GELU_TANH = 2 };

// out [N, num_outputs] = x weight^T + bias, summed in float32. An output's bits do not depend on the other rows. With an
// activation the weight, and the bias, have 2 * num_outputs rows, gates before the others, and
// out = activation(gates) * others, rounded once.
struct BatonLinear {
  const int32_t* num_rows;
  const void* x;
  const void* weight;  // [num_outputs or twice as many, num_inputs], contiguous
  const float* bias;   // or null
  void* out;
  int64_t x_stride;
  int64_t out_stride;
  int32_t num_inputs;
  int32_t num_outputs;
  int32_t dtype;  // of x and weight
  int32_t out_dtype;
  int32_t activation;
};

// Rotates queries (in place) and keys of the fused projection qkv [T, (H + 2K) * D], each head normalised before where
// there is a norm, and writes keys and values to the pool at the step's slots. cos_sin is [positions, D]: D/2 cosines,
// then D/2 sines.
struct BatonRotaryWrite {
  BatonKVLayer kv;
  void* qkv;
  const float* cos_sin;  // or null: nothing is rotated
  const float* q_norm;   // [D], or null
  const float* k_norm;   // [D], or null
  int64_t token_stride;
  int32_t num_heads;
  float eps;
};

// Attention of S sequences. Tokens query_starts[s] .. query_starts[s + 1] - 1 belong to sequence s and stand at its
// positions context_starts[s], context_starts[s] + 1, ...; each sees the last `window` positions up to its own, or all of
// them if window is 0. Their keys and values are in the pool already, through the block ids
// block_tables[table_starts[s] ...]. With selected_only no more than the outputs of the tokens in `rows` are wanted.
struct BatonAttention {
  BatonKVLayer kv;
  const void* q;  // [T, H, D], heads contiguous
  void* out;      // [T, H, D], heads contiguous
  int64_t q_token_stride;
  int64_t out_token_stride;
  int32_t num_heads;
  int32_t window;
  float scale;
  int32_t selected_only;
};

// ids [N] and values [N]: the first largest element of each row of logits [N, size], NaN where the row holds one.
struct BatonArgmax {
  const int32_t* num_rows;
  const float* logits;
  int64_t* ids;
  float* values;
  int32_t size;
};

enum BatonOpKind : int32_t {
  BATON_EMBED = 0,
  BATON_SELECT_ROWS = 1,
  BATON_ADD_NORM = 2,
  BATON_LINEAR = 3,
  BATON_ROTARY_WRITE = 4,
  BATON_ATTENTION = 5,
  BATON_ARGMAX = 6,
  BATON_PLACE_ROWS = 7,
};

struct BatonOp {
  const void* args;  // the struct that belongs to the kind
  int32_t kind;
};

// A number of threads that run programs together, the caller's included. One program at a time.
struct BatonTeam;

// 1 if this build has kernels for `isa` and this machine can run them.
BATON_EXPORT int32_t baton_isa_supported(int32_t isa);
// The fastest of those supported.
BATON_EXPORT int32_t baton_best_isa();

BATON_EXPORT BatonTeam* baton_team_create(int32_t num_threads);

// Ends its threads. No program may be running.
BATON_EXPORT void baton_team_destroy(BatonTeam* team);

// Runs operations begin .. end - 1 of a program, one after the other, each split over the team.
BATON_EXPORT void baton_run(BatonTeam* team, const BatonOp* ops, int32_t begin, int32_t end, const BatonStep* step,
                            int32_t isa);

}  // extern "C"

#endif
