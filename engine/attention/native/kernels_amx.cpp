// Products of bfloat16 matrices with AMX; what else is computed is avx512_bf16's.
#define BATON_ISA_NAMESPACE amx
#define BATON_WIDTH 16
#define BATON_BF16_PAIRS
#define BATON_AMX_TILES
#include "kernels_amx.h"

#include <immintrin.h>

#include "amx_tiles.h"

namespace baton {
namespace BATON_ISA_NAMESPACE {
namespace {

constexpr int CACHE_LINE_BYTES = 64;

#include "simd.h"
//
#include "gate_impl.h"
#include "linear_impl.h"

}  // namespace

int64_t linear_bf16_num_items(const BatonLinear& args, int num_threads) {
  return num_items_of(LinearPlan<Bf16Products>(args, num_threads));
}

size_t linear_bf16_scratch_size_bytes(const BatonLinear& args, int num_threads) {
  return LinearPlan<Bf16Products>(args, num_threads).scratch_size_bytes;
}

void linear_bf16_item(const BatonLinear& args, int num_threads, int64_t item, void* scratch) {
  tiles_begin();
  compute_item(LinearPlan<Bf16Products>(args, num_threads), item, scratch);
  tiles_end();
}

}  // namespace BATON_ISA_NAMESPACE
}  // namespace baton
