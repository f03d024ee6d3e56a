// All kernels for one instruction set. The including file defines BATON_ISA_NAMESPACE, BATON_WIDTH (floats a vector),
// BATON_ROWS and BATON_COLUMNS (the register tile), and is compiled with that instruction set's flags.
#include <cstddef>
#include <cstdint>
#if BATON_WIDTH >= 8
#include <immintrin.h>
#endif

#include "kernel_table.h"

namespace baton {
namespace BATON_ISA_NAMESPACE {
namespace {

#include "simd.h"
//
#include "multiply_impl.h"
//
#include "pack_impl.h"
//
#include "few_rows_impl.h"
//
#include "attention_impl.h"
#include "elementwise_impl.h"
#include "gate_impl.h"
#include "linear_impl.h"

}  // namespace

extern const KernelTable table;
const KernelTable table = {
    linear_num_items, linear_scratch_size_bytes, linear_item, attention_scratch_size_bytes, attention_tile_tokens,
    attention_tile, embed, add_norm, rotary_write, argmax,
};

}  // namespace BATON_ISA_NAMESPACE
}  // namespace baton
