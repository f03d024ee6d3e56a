// The small matrix product of attention, with ROWS x COLUMNS vectors of sums in registers.
//
// Included inside `namespace baton::BATON_ISA_NAMESPACE { namespace {`, after simd.h.

constexpr int ROWS = BATON_ROWS;        // rows of the register tile
constexpr int COLUMNS = BATON_COLUMNS;  // vectors of the register tile

// A "word" is what one lane multiplies at a time: one float32, or where the machine has a dot product of bfloat16
// pairs, two bfloat16 neighbours along the summed axis.
struct FloatWords {
  typedef float word;
  static constexpr int PER_WORD = 1;
  BATON_INLINE vf multiply_add(vf sum, float a, vf b) { return sum + a * b; }
};

#ifdef BATON_BF16_PAIRS
struct PairWords {
  typedef uint32_t word;
  static constexpr int PER_WORD = 2;
  BATON_INLINE vf multiply_add(vf sum, uint32_t a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), bit_cast<__m512bh>(b));
  }
};
#endif

template <class T>
struct WordsOf {
  typedef FloatWords type;
};
#ifdef BATON_BF16_PAIRS
template <>
struct WordsOf<bf16> {
  typedef PairWords type;
};
#endif

// c[R, N vectors] (+)= a[R, k] b[k, N vectors], over words. `between` is called at each step of the sum.
template <class Words, int R, int N, class Between>
BATON_INLINE void multiply_tile(const typename Words::word* a, int a_stride, const float* b, int b_stride, float* c,
                                int c_stride, int k_words, bool accumulate, Between between) {
  vf sum[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[r][n] = accumulate ? load(c + r * c_stride + n * W) : zero();
  for (int k = 0; k < k_words; ++k) {
    between();
    vf column[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) column[n] = load(b + (size_t)k * b_stride + n * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[r][n] = Words::multiply_add(sum[r][n], a[r * a_stride + k], column[n]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(c + r * c_stride + n * W, sum[r][n]);
}

template <class Words, int R, class Between>
static void multiply_rows(const typename Words::word* a, int a_stride, const float* b, int b_stride, float* c,
                          int c_stride, int columns, int k_words, bool accumulate, Between between) {
  int n = 0;
  for (; n + COLUMNS * W <= columns; n += COLUMNS * W)
    multiply_tile<Words, R, COLUMNS>(a, a_stride, b + n, b_stride, c + n, c_stride, k_words, accumulate, between);
  for (; n < columns; n += W)
    multiply_tile<Words, R, 1>(a, a_stride, b + n, b_stride, c + n, c_stride, k_words, accumulate, between);
}

// c[rows, columns] (+)= a[rows, k] b[k, columns]; columns is a multiple of W.
template <class Words, class Between>
static void multiply(const float* a_base, int a_stride, const float* b, int b_stride, float* c, int c_stride, int rows,
                     int columns, int k_words, bool accumulate, Between between) {
  const typename Words::word* a = reinterpret_cast<const typename Words::word*>(a_base);
  for (; rows >= ROWS; rows -= ROWS, a += (size_t)ROWS * a_stride, c += (size_t)ROWS * c_stride)
    multiply_rows<Words, ROWS>(a, a_stride, b, b_stride, c, c_stride, columns, k_words, accumulate, between);
  switch (rows) {
    case 5: return multiply_rows<Words, 5>(a, a_stride, b, b_stride, c, c_stride, columns, k_words, accumulate, between);
    case 4: return multiply_rows<Words, 4>(a, a_stride, b, b_stride, c, c_stride, columns, k_words, accumulate, between);
    case 3: return multiply_rows<Words, 3>(a, a_stride, b, b_stride, c, c_stride, columns, k_words, accumulate, between);
    case 2: return multiply_rows<Words, 2>(a, a_stride, b, b_stride, c, c_stride, columns, k_words, accumulate, between);
    case 1: return multiply_rows<Words, 1>(a, a_stride, b, b_stride, c, c_stride, columns, k_words, accumulate, between);
  }
}
