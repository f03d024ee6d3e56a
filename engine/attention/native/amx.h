// The instruction set "amx": avx512_bf16 with products of bfloat16 matrices by AMX.
#ifndef BATON_AMX_H
#define BATON_AMX_H

#include "kernel_table.h"

namespace baton {

// Whether this machine has AMX for bfloat16 and its kernel lets this process use it. Asks the kernel for that.
bool is_amx_supported();

const KernelTable& amx_table();

}  // namespace baton

#endif
