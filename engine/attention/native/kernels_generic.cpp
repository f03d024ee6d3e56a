// Vectors of 4 floats: SSE2 on x86-64, NEON on 64-bit Arm. 16 registers: 4 x 2 sums, 2 columns.
#define BATON_ISA_NAMESPACE generic
#define BATON_WIDTH 4
#define BATON_ROWS 4
#define BATON_COLUMNS 2
#include "kernels_impl.h"
