#include "amx.h"

#include "kernels_amx.h"

#ifdef __linux__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace baton {
namespace {

int64_t num_items(const BatonLinear& args, int num_threads) {
  return args.dtype == BATON_BFLOAT16 ? amx::linear_bf16_num_items(args, num_threads)
                                      : avx512_bf16::table.linear_num_items(args, num_threads);
}

size_t scratch_size_bytes(const BatonLinear& args, int num_threads) {
  return args.dtype == BATON_BFLOAT16 ? amx::linear_bf16_scratch_size_bytes(args, num_threads)
                                      : avx512_bf16::table.linear_scratch_size_bytes(args, num_threads);
}

void item(const BatonLinear& args, int num_threads, int64_t item, void* scratch) {
  return args.dtype == BATON_BFLOAT16 ? amx::linear_bf16_item(args, num_threads, item, scratch)
                                      : avx512_bf16::table.linear_item(args, num_threads, item, scratch);
}

#ifdef __linux__
bool has_processor_amx() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
  return (edx & AMX_BF16) && (edx & AMX_TILE);
}

// The tiles' 8 KB are part of a thread's state only where a process has asked for them (Linux 5.16 and later).
bool is_permitted() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

}  // namespace

bool is_amx_supported() {
#ifdef __linux__
  static const bool is_supported = has_processor_amx() && is_permitted();
  return is_supported;
#else
  return false;
#endif
}

const KernelTable& amx_table() {
  static const KernelTable table = [] {
    KernelTable made = avx512_bf16::table;
    made.linear_num_items = num_items;
    made.linear_scratch_size_bytes = scratch_size_bytes;
    made.linear_item = item;
    return made;
  }();
  return table;
}

}  // namespace baton
