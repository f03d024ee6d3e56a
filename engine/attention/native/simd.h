// Vectors of BATON_WIDTH floats through the compiler's vector extension: one source for every instruction set.
//
// Included inside `namespace baton::BATON_ISA_NAMESPACE { namespace {`. Nothing here may call an inline function of the
// standard library: the linker keeps one copy of those, and it could be the one compiled for a newer machine.

constexpr int W = BATON_WIDTH;

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

struct bf16 {
  uint16_t bits;
};

#define BATON_INLINE static inline __attribute__((always_inline))

template <class To, class From>
BATON_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

BATON_INLINE vf splat(float x) { return vf{} + x; }
BATON_INLINE vf zero() { return vf{}; }
BATON_INLINE vf max(vf a, vf b) { return a > b ? a : b; }

BATON_INLINE vi lane_index() {
  vi v;
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) v[i] = i;
  return v;
}

BATON_INLINE vf load(const float* p) {
  vf v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

BATON_INLINE void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }

// bfloat16 is the upper half of a float32: widening is a shift.
BATON_INLINE vf load(const bf16* p) {
  vh half;
  __builtin_memcpy(&half, p, sizeof half);
  return bit_cast<vf>(__builtin_convertvector(half, vu) << 16);
}

// Round to nearest, ties to even; NaN stays NaN. Subnormal numbers become zero where the machine rounds, as they do in
// its products.
BATON_INLINE vh round_to_bf16(vf v) {
#ifdef BATON_BF16_PAIRS
  return bit_cast<vh>(_mm512_cvtneps_pbh((__m512)v));
#else
  const vu bits = bit_cast<vu>(v);
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(v == v ? rounded : (vu{} + 0x7fc0u), vh);
#endif
}

BATON_INLINE void store(bf16* p, vf v) {
  const vh half = round_to_bf16(v);
  __builtin_memcpy(p, &half, sizeof half);
}

// The first n < W elements; the other lanes are zero.
template <class T>
BATON_INLINE vf load_part(const T* p, int n) {
  T lanes[W] = {};
  __builtin_memcpy(lanes, p, n * sizeof(T));
  return load(lanes);
}

template <class T>
BATON_INLINE void store_part(T* p, vf v, int n) {
  T lanes[W];
  store(lanes, v);
  __builtin_memcpy(p, lanes, n * sizeof(T));
}

template <class T>
BATON_INLINE vf load_up_to(const T* p, int n) {
  return n >= W ? load(p) : load_part(p, n);
}

template <class T>
BATON_INLINE void store_up_to(T* p, vf v, int n) {
  if (n >= W) {
    store(p, v);
  } else {
    store_part(p, v, n);
  }
}

BATON_INLINE float sum_lanes(vf v) {
#pragma GCC unroll 4
  for (int step = W / 2; step > 0; step /= 2) v += __builtin_shuffle(v, lane_index() ^ step);
  return v[0];
}

BATON_INLINE float max_lanes(vf v) {
#pragma GCC unroll 4
  for (int step = W / 2; step > 0; step /= 2) v = max(v, __builtin_shuffle(v, lane_index() ^ step));
  return v[0];
}

// Whether a lane of a is greater than that of b.
BATON_INLINE bool any_greater(vf a, vf b) {
#if BATON_WIDTH == 16
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#elif BATON_WIDTH == 8
  return _mm256_movemask_ps((__m256)(a > b)) != 0;
#else
  const vi greater = a > b;
  int32_t any = 0;
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) any |= greater[i];
  return any != 0;
#endif
}

// 2^x for x <= 127, within 2 units in the last place; below -126 a subnormal number or 0. NaN stays NaN.
// x = n + f with n whole and |f| <= 1/2; 2^f by a polynomial of least relative error (1e-7), 2^n into the exponent.
BATON_INLINE vf exp2(vf x) {
#if BATON_WIDTH == 16
  const vf whole = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vf clamped = x < splat(-126.0f) ? splat(-126.0f) : x;
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const vf whole = (clamped + magic) - magic;
#endif
  const vf f = x - whole;
  vf series = splat(1.32647273e-3f);
  series = series * f + 9.67151299e-3f;
  series = series * f + 5.55073358e-2f;
  series = series * f + 2.40222424e-1f;
  series = series * f + 6.93147004e-1f;
  series = series * f + 1.0f;
#if BATON_WIDTH == 16
  return (vf)_mm512_scalef_ps((__m512)series, (__m512)whole);
#else
  const vi exponent = (__builtin_convertvector(whole, vi) + 127) << 23;
  return x < splat(-126.0f) ? zero() : series * bit_cast<vf>(exponent);
#endif
}

// 1 / x for 1 <= x <= 2^127, within 2 units in the last place.
BATON_INLINE vf reciprocal(vf x) {
#if BATON_WIDTH == 16
  // A step of Newton's method on the machine's approximation, which costs a third of a division.
  const vf near = (vf)_mm512_rcp14_ps((__m512)x);
  return near + near * (1.0f - x * near);
#else
  return 1.0f / x;
#endif
}

#if BATON_WIDTH == 16
// In-place transposition of W vectors of W words: of words within quarters of vectors, then of the quarters.
BATON_INLINE void transpose(vf (&rows)[W]) {
  __m512 pairs[W], quads[W], halves[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; i += 2) {
    pairs[i] = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
  }
  auto unpack = [](__m512 a, __m512 b, auto high) __attribute__((always_inline)) {
    return (__m512)(high ? _mm512_unpackhi_pd((__m512d)a, (__m512d)b) : _mm512_unpacklo_pd((__m512d)a, (__m512d)b));
  };
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 4) {
    quads[i] = unpack(pairs[i], pairs[i + 2], false);
    quads[i + 1] = unpack(pairs[i], pairs[i + 2], true);
    quads[i + 2] = unpack(pairs[i + 1], pairs[i + 3], false);
    quads[i + 3] = unpack(pairs[i + 1], pairs[i + 3], true);
  }
  // Quarter q of quads[4 i + j] holds column 4 q + j of rows 4 i .. 4 i + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    halves[j] = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0x88);
    halves[4 + j] = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0xdd);
    halves[8 + j] = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0x88);
    halves[12 + j] = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    rows[j] = (vf)_mm512_shuffle_f32x4(halves[j], halves[8 + j], 0x88);
    rows[8 + j] = (vf)_mm512_shuffle_f32x4(halves[j], halves[8 + j], 0xdd);
    rows[4 + j] = (vf)_mm512_shuffle_f32x4(halves[4 + j], halves[12 + j], 0x88);
    rows[12 + j] = (vf)_mm512_shuffle_f32x4(halves[4 + j], halves[12 + j], 0xdd);
  }
}
#else
// In-place transposition of W vectors of W words. Each of the log2(W) passes interleaves vector i with vector
// i + W/2, which rotates the bits of the address (row, column) by one place.
BATON_INLINE void transpose(vf (&rows)[W]) {
  const vi lane = lane_index();
  const vi low = (lane >> 1) + (lane & 1) * W;
  const vi high = low + W / 2;
#pragma GCC unroll 4
  for (int pass = 1; pass < W; pass *= 2) {
    vf next[W];
#pragma GCC unroll 8
    for (int i = 0; i < W / 2; ++i) {
      next[2 * i] = __builtin_shuffle(rows[i], rows[i + W / 2], low);
      next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + W / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) rows[i] = next[i];
  }
}
#endif
