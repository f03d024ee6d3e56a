// All kernels for one instruction set. The including file defines BATON_ISA_NAMESPACE, BATON_WIDTH (floats a vector),
// BATON_ROWS and BATON_COLUMNS (the register tile), and is compiled with that instruction set's flags.
#include <cstddef>
#include <cstdint>
#ifdef BATON_BF16_PAIRS
#include <immintrin.h>
#endif

#include "kernel_table.h"

namespace baton {
namespace BATON_ISA_NAMESPACE {
namespace {

#include "simd.h"
//
#include "attention_impl.h"
#include "elementwise_impl.h"
#include "logits_impl.h"

}  // namespace

extern const KernelTable table;
const KernelTable table = {attention_scratch_size_bytes, attention_tile_tokens, attention_tile, rotary_write, rms_norm,
                           silu_mul, logits};

}  // namespace BATON_ISA_NAMESPACE
}  // namespace baton
