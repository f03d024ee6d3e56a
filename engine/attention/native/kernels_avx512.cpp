// Vectors of 16 floats, 32 registers: 6 x 4 sums, 4 columns; rows are broadcast from memory.
#define BATON_ISA_NAMESPACE avx512
#define BATON_WIDTH 16
#define BATON_ROWS 6
#define BATON_COLUMNS 4
#include "kernels_impl.h"
