// Vectors of 8 floats, 16 registers: 6 x 2 sums, 2 columns.
#define BATON_ISA_NAMESPACE avx2
#define BATON_WIDTH 8
#define BATON_ROWS 6
#define BATON_COLUMNS 2
#include "kernels_impl.h"
