// From the sums of a product, whose lanes are rows, to its outputs, whose lanes are outputs.
//
// Included by linear_impl.h, after linear_tiles.h.

// Outputs that are transposed together, and what stores them for up to W rows: sums [outputs, stride], of which the first
// `count` outputs and the first num_rows lanes exist.
template <class T>
struct Square {
  static constexpr int OUTPUTS = W;

  BATON_INLINE void store_rows(const float* sums, int stride, T* out, int64_t out_stride, int num_rows, int count) {
    vf rows[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) rows[i] = load(sums + i * stride);
    transpose(rows);
    if (num_rows == W && count >= W) {
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) store(out + i * out_stride, rows[i]);
    } else {
      for (int i = 0; i < num_rows; ++i) store_up_to(out + i * out_stride, rows[i], count);
    }
  }
};

#ifdef BATON_BF16_PAIRS
// Rounded before they are transposed, which takes half the shuffles, and whole cache lines are stored.
template <>
struct Square<bf16> {
  static constexpr int OUTPUTS = 2 * W;

  BATON_INLINE void store_rows(const float* sums, int stride, bf16* out, int64_t out_stride, int num_rows, int count) {
    __m512i rows[W];
    transpose_rounded(sums, stride, rows);
    if (num_rows == W && count >= OUTPUTS) {
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) _mm512_storeu_si512(out + i * out_stride, rows[i]);
    } else {
      const int num_outputs = count < OUTPUTS ? count : OUTPUTS;
      for (int i = 0; i < num_rows; ++i)
        __builtin_memcpy(static_cast<void*>(out + i * out_stride), &rows[i], num_outputs * sizeof(bf16));
    }
  }

  // An element's address is the number of its vector (4 bits), the lane of 128 bits (2) and its place there (3). Outputs
  // i and i + 8 begin in one vector, so that the lane is (bit 3 of the output, bit 3 of the row) and the place the rest
  // of the row. Each of three passes exchanges a bit of the place for one of the vector, the last one a bit of the lane.
  BATON_INLINE void transpose_rounded(const float* sums, int stride, __m512i (&rows)[W]) {
    __m512i pairs[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      const float* first = sums + (i % 2 * W + i / 2) * stride;
      pairs[i] = (__m512i)_mm512_cvtne2ps_pbh((__m512)load(first + 8 * stride), (__m512)load(first));
    }
    interleave(pairs, rows);
    interleave(rows, pairs);
    interleave(pairs, rows);
#pragma GCC unroll 8
    for (int i = 0; i < W / 2; ++i) {
      pairs[i] = _mm512_shuffle_i32x4(rows[i], rows[i + W / 2], 0x88);
      pairs[i + W / 2] = _mm512_shuffle_i32x4(rows[i], rows[i + W / 2], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) rows[i] = pairs[i];
  }

  BATON_INLINE void interleave(const __m512i (&from)[W], __m512i (&to)[W]) {
#pragma GCC unroll 8
    for (int i = 0; i < W / 2; ++i) {
      to[2 * i] = _mm512_unpacklo_epi16(from[i], from[i + W / 2]);
      to[2 * i + 1] = _mm512_unpackhi_epi16(from[i], from[i + W / 2]);
    }
  }
};
#endif

// A strip's outputs for up to C vectors of rows, to where they belong.
template <class T, int C>
static void store_panel(const BatonLinear& args, int row, int num_rows, int output, int count, const float* partial) {
  for (int c = 0; c < C; ++c) {
    T* const out = static_cast<T*>(args.out) + (row + c * W) * args.out_stride + output;
    const int rows = num_rows - c * W < W ? num_rows - c * W : W;
    for (int at = 0; at < count; at += Square<T>::OUTPUTS)
      Square<T>::store_rows(partial + (at * C + c) * W, C * W, out + at, args.out_stride, rows, count - at);
  }
}
