// The C entry points.
#ifdef BATON_HAVE_X86
#include "amx.h"
#endif
#include "kernel_table.h"
#include "kernels.h"
#include "program.h"
#include "thread_team.h"

namespace baton {
namespace {

#ifdef BATON_HAVE_X86
const KernelTable& mixed_table() {
  static const KernelTable mixed = [] {
    KernelTable table = avx512_bf16::table;
    table.linear_num_items = avx512::table.linear_num_items;
    table.linear_scratch_size_bytes = avx512::table.linear_scratch_size_bytes;
    table.linear_item = avx512::table.linear_item;
    return table;
  }();
  return mixed;
}
#endif

const KernelTable& table_of(int32_t isa) {
  switch (isa) {
#ifdef BATON_HAVE_X86
    case BATON_AVX512_MIXED: return mixed_table();
    case BATON_AMX: return amx_table();
    case BATON_AVX512_BF16: return avx512_bf16::table;
    case BATON_AVX512: return avx512::table;
    case BATON_AVX2: return avx2::table;
#endif
    default: return generic::table;
  }
}

}  // namespace
}  // namespace baton

struct BatonTeam {
  explicit BatonTeam(int32_t num_threads) : threads(num_threads) {}
  baton::ThreadTeam threads;
};

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
  const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (isa == BATON_AVX512_BF16 || isa == BATON_AVX512_MIXED) return avx512_bf16;
  if (isa == BATON_AMX) return avx512_bf16 && baton::is_amx_supported();
#endif
  return 0;
}

// Dot products of bfloat16 pairs are twice as fast as multiply-adds of widened numbers on AMD's cores. On Intel's, whose
// place for such products is AMX, they are slower by almost half (Emerald Rapids: 41 and 75 GMAC/s), except where widening
// costs more than multiplying, as in attention's pass over KV (14 and 11 GB/s). The maker decides, not a measurement: low
// bits differ, so workers on equal hosts have to choose alike.
int32_t baton_best_isa() {
#ifdef BATON_HAVE_X86
  if (baton_isa_supported(BATON_AMX)) return BATON_AMX;
  if (baton_isa_supported(BATON_AVX512_BF16)) return __builtin_cpu_is("intel") ? BATON_AVX512_MIXED : BATON_AVX512_BF16;
  if (baton_isa_supported(BATON_AVX512)) return BATON_AVX512;
  if (baton_isa_supported(BATON_AVX2)) return BATON_AVX2;
#endif
  return BATON_GENERIC;
}

BatonTeam* baton_team_create(int32_t num_threads) { return new BatonTeam(num_threads); }

void baton_team_destroy(BatonTeam* team) { delete team; }

void baton_run(BatonTeam* team, const BatonOp* ops, int32_t begin, int32_t end, const BatonStep* step, int32_t isa) {
  baton::Program program(baton::table_of(isa), ops, begin, end, *step, team->threads.num_threads());
  team->threads.run(program);
}

}  // extern "C"
