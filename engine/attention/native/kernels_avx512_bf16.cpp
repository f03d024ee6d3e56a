// As avx512, with products of bfloat16 pairs that are summed in float32 (vdpbf16ps).
#define BATON_ISA_NAMESPACE avx512_bf16
#define BATON_WIDTH 16
#define BATON_ROWS 6
#define BATON_COLUMNS 4
#define BATON_BF16_PAIRS
#include "kernels_impl.h"
