// What kernels_amx.cpp provides: KernelTable's functions of the same names, for bfloat16 operands only.
#ifndef BATON_KERNELS_AMX_H
#define BATON_KERNELS_AMX_H

#include <cstddef>

#include "kernels.h"

namespace baton {
namespace amx {

int64_t linear_bf16_num_items(const BatonLinear& args, int num_threads);
size_t linear_bf16_scratch_size_bytes(const BatonLinear& args, int num_threads);
void linear_bf16_item(const BatonLinear& args, int num_threads, int64_t item, void* scratch);

}  // namespace amx
}  // namespace baton

#endif
