// The register tiles of linear_impl.h, and how their operands are laid out.
//
// Included inside `namespace baton::BATON_ISA_NAMESPACE { namespace {`, after simd.h.

constexpr int LANE_WORDS = 4;                         // of 128 bits, within which x86 shuffles best
constexpr int SQUARE_WORDS = W == 16 ? 8 : 4;         // that few_rows_tile takes of W rows of the weight at a time
constexpr int TILE_VECTORS = 2;                       // of rows of x, in many_rows_tile
constexpr int PANEL_ROWS = TILE_VECTORS * W;

BATON_INLINE vu load_words(const void* p) {
  vu v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

BATON_INLINE void store_words(void* p, vu v) { __builtin_memcpy(p, &v, sizeof v); }

BATON_INLINE vu splat_word(const void* p) {
  uint32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return vu{} + word;
}

// A word is one float32, or two bfloat16: these are the first and the second of the two, as float32.
BATON_INLINE vu first_of_pairs(vu words) { return words << 16; }
BATON_INLINE vu second_of_pairs(vu words) { return words & 0xffff0000u; }

// How elements are multiplied. A step of a sum adds the products of a word of each operand. Where the machine cannot
// multiply bfloat16 pairs they are widened to float32, and a word takes two steps.
struct FloatProducts {
  typedef float element;
  static constexpr int WORD_ELEMENTS = 1;
  static constexpr int WORD_STEPS = 1;
  BATON_INLINE vf add(vf sum, vu a, vu b) { return sum + bit_cast<vf>(a) * bit_cast<vf>(b); }
};

#ifdef BATON_BF16_PAIRS
struct Bf16Products {
  typedef bf16 element;
  static constexpr int WORD_ELEMENTS = 2;
  static constexpr int WORD_STEPS = 1;
  BATON_INLINE vf add(vf sum, vu a, vu b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b));
  }
};
#else
struct Bf16Products {
  typedef bf16 element;
  static constexpr int WORD_ELEMENTS = 2;
  static constexpr int WORD_STEPS = 2;
  BATON_INLINE vf add(vf sum, vu a, vu b) { return FloatProducts::add(sum, a, b); }
};
#endif

// Rows of words that lie some distance apart.
struct WordRows {
  const char* data;
  size_t stride_bytes;
};

// ---- few rows of x

// Words of two rows beside each other, half a vector of each. Where half a vector is no whole lane: of the first only.
BATON_INLINE vu load_two_rows(const char* first, const char* second) {
#if BATON_WIDTH == 16
  const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)first));
  return (vu)_mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i*)second), 1);
#elif BATON_WIDTH == 8
  const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)first));
  return (vu)_mm256_inserti128_si256(low, _mm_loadu_si128((const __m128i*)second), 1);
#else
  (void)second;
  return load_words(first);
#endif
}

// Transposes the 4 x 4 words in each lane.
BATON_INLINE void transpose_lanes(vu (&v)[LANE_WORDS]) {
  const vi lane = lane_index();
  const vi start = lane & ~(LANE_WORDS - 1), place = lane & (LANE_WORDS - 1);
  const vi words = start + (place >> 1) + (place & 1) * W;
  const vi pairs = start + (place & 1) + (place >> 1) * W;
  const vu a = __builtin_shuffle(v[0], v[1], words), b = __builtin_shuffle(v[0], v[1], words + 2);
  const vu c = __builtin_shuffle(v[2], v[3], words), d = __builtin_shuffle(v[2], v[3], words + 2);
  v[0] = __builtin_shuffle(a, c, pairs);
  v[1] = __builtin_shuffle(a, c, pairs + 2);
  v[2] = __builtin_shuffle(b, d, pairs);
  v[3] = __builtin_shuffle(b, d, pairs + 2);
}

// columns[i] = word i of each of W rows. Half of the transposition is done by where the rows' words are loaded to.
BATON_INLINE void load_columns(WordRows rows, vu (&columns)[SQUARE_WORDS]) {
  constexpr int HALVES = SQUARE_WORDS / LANE_WORDS;
  vu lanes[HALVES][LANE_WORDS];
#pragma GCC unroll 2
  for (int half = 0; half < HALVES; ++half) {
#pragma GCC unroll 4
    for (int i = 0; i < LANE_WORDS; ++i) {
      const char* first = rows.data + (half * 2 * LANE_WORDS + i) * rows.stride_bytes;
      lanes[half][i] = load_two_rows(first, first + LANE_WORDS * rows.stride_bytes);
    }
    transpose_lanes(lanes[half]);
  }
#if BATON_WIDTH == 16
  const vi lane = lane_index();
  const vi even_lanes = (lane & 3) + ((lane >> 2) & 1) * 8 + (lane >> 3) * W;
#pragma GCC unroll 4
  for (int i = 0; i < LANE_WORDS; ++i) {
    columns[i] = __builtin_shuffle(lanes[0][i], lanes[1][i], even_lanes);
    columns[LANE_WORDS + i] = __builtin_shuffle(lanes[0][i], lanes[1][i], even_lanes + LANE_WORDS);
  }
#else
#pragma GCC unroll 4
  for (int i = 0; i < LANE_WORDS; ++i) columns[i] = lanes[0][i];
#endif
}

// Fetches what few_rows_tile reads of each row AHEAD_BYTES later: W rows, so some 12 KB are on their way at any time.
// That is further than the present rows go near their end; then the W rows after them are next. They are fetched into
// the second-level cache, because rows of a multiple of 4 KB crowd the first.
BATON_INLINE void fetch_few_rows_ahead(WordRows weight, int at, int row_words) {
  constexpr int AHEAD_BYTES = 12 * CACHE_LINE_BYTES;
  constexpr int SHARES = CACHE_LINE_BYTES / (SQUARE_WORDS * 4);  // squares that share a line of each row
  constexpr int COUNT = W / SHARES;
  const int first_row = at / SQUARE_WORDS % SHARES * COUNT + (at + AHEAD_BYTES / 4 >= row_words ? W - 1 : 0);
  const char* line = weight.data + first_row * weight.stride_bytes + AHEAD_BYTES;
#pragma GCC unroll 16
  for (int i = 0; i < COUNT; ++i) __builtin_prefetch(line + i * weight.stride_bytes, 0, 2);
}

// partial [R, W] = R rows of x with W rows of the weight, over num_words words; added to it unless it is_first.
// x is [num_words, WORD_STEPS, R].
template <class P, int R>
static void few_rows_tile(WordRows weight, const uint32_t* x, int num_words, bool is_fetching_ahead, bool is_first,
                          float* partial) {
  constexpr int STEPS = P::WORD_STEPS;
  vf sums[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sums[r] = is_first ? zero() : load(partial + r * W);
  for (int at = 0; at < num_words; at += SQUARE_WORDS) {
    vu columns[SQUARE_WORDS];
    load_columns(weight, columns);
    if (is_fetching_ahead) fetch_few_rows_ahead(weight, at, num_words);
#pragma GCC unroll 8
    for (int i = 0; i < SQUARE_WORDS; ++i) {
#pragma GCC unroll 2
      for (int step = 0; step < STEPS; ++step) {
        const vu words = STEPS == 1  ? columns[i]
                         : step == 0 ? first_of_pairs(columns[i])
                                     : second_of_pairs(columns[i]);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) sums[r] = P::add(sums[r], words, splat_word(x + (i * STEPS + step) * R + r));
      }
    }
    weight.data += SQUARE_WORDS * 4;
    x += SQUARE_WORDS * STEPS * R;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) store(partial + r * W, sums[r]);
}

// ---- many rows of x

// Rows of the weight that are wanted soon. A tile fetches them while it multiplies others, so that reading the weight and
// computing go on side by side. Into the second-level cache, as few_rows_tile does.
struct Ahead {
  WordRows rows;
  int num_rows;
};

// The rows' cache line that lies so many bytes behind their beginnings.
BATON_INLINE void fetch(const Ahead& ahead, int offset_bytes) {
  const char* line = ahead.rows.data + offset_bytes;
  for (int row = 0; row < ahead.num_rows; ++row, line += ahead.rows.stride_bytes) __builtin_prefetch(line, 0, 2);
}

#ifdef BATON_AMX_TILES
#include "linear_amx.h"
#else

constexpr int GRANULE_WORDS = SQUARE_WORDS;           // of which the tiles take whole numbers
constexpr int TILE_OUTPUTS = W >= 8 ? W * 3 / 4 : 6;  // of many_rows_tile: times TILE_VECTORS, 3/4 of the registers
constexpr int UNROLLED_STEPS = 4;                     // of many_rows_tile

// partial [TILE_OUTPUTS, C, W] = as many rows of the weight with C vectors of rows of x, over num_steps steps; added to
// it unless it is_first. x is [num_steps, C, W].
template <class P, int C>
static void many_rows_tile(WordRows weight, const uint32_t* x, int num_steps, const Ahead& ahead, bool is_first,
                           float* partial) {
  constexpr int R = TILE_OUTPUTS;
  constexpr int LINE_STEPS = CACHE_LINE_BYTES / 4 * P::WORD_STEPS;  // that a line of the weight lasts
  vf sums[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sums[r][c] = is_first ? zero() : load(partial + (r * C + c) * W);
  for (int at = 0; at < num_steps; at += UNROLLED_STEPS) {
    if (at % LINE_STEPS == 0) fetch(ahead, at / LINE_STEPS * CACHE_LINE_BYTES);
#pragma GCC unroll 4
    for (int i = 0; i < UNROLLED_STEPS; ++i) {
      vu rows[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) rows[c] = load_words(x + ((size_t)(at + i) * C + c) * W);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vu word = splat_word(weight.data + r * weight.stride_bytes + (at + i) * 4);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[r][c] = P::add(sums[r][c], word, rows[c]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(partial + (r * C + c) * W, sums[r][c]);
}

#endif

// ---- laying out

// W words of a row from `row` on, of which num_elements are left; what is beyond is zero.
template <class T>
BATON_INLINE vu load_row_words(const T* row, int num_elements) {
  constexpr int VECTOR_ELEMENTS = W * 4 / sizeof(T);
  if (num_elements >= VECTOR_ELEMENTS) return load_words(row);
  T part[VECTOR_ELEMENTS] = {};
  if (num_elements > 0) __builtin_memcpy(part, row, num_elements * sizeof(T));
  return load_words(part);
}

// num_words words of a row, and whatever fills the last vector.
template <class P>
static void copy_row(const typename P::element* row, int num_elements, int num_words, uint32_t* target) {
  for (int at = 0; at < num_words; at += W)
    store_words(target + at, load_row_words(row + at * P::WORD_ELEMENTS, num_elements - at * P::WORD_ELEMENTS));
}

// The same of bfloat16 as float32, which is twice as many words.
BATON_INLINE void widen_row(const bf16* row, int num_elements, int num_words, uint32_t* target) {
  float* floats = reinterpret_cast<float*>(target);
  for (int at = 0; at < 2 * num_words; at += W)
    store(floats + at, at < num_elements ? load_up_to(row + at, num_elements - at) : zero());
}

// count <= W rows of x as [num_words, WORD_STEPS, count]. Writes up to a vector more.
template <class P>
static void interleave_rows(const typename P::element* x, int64_t x_stride, int count, int num_inputs, int num_words,
                            uint32_t* target) {
  if (count == 1 && P::WORD_STEPS == 1) return copy_row<P>(x, num_inputs, num_words, target);
  for (int at = 0; at < num_words; at += W) {
    vf square[W];
    for (int i = 0; i < W; ++i)
      square[i] = i < count ? bit_cast<vf>(load_row_words(x + i * x_stride + at * P::WORD_ELEMENTS,
                                                          num_inputs - at * P::WORD_ELEMENTS))
                            : zero();
    transpose(square);
    // Whole vectors are stored, of which the next one overwrites the lanes that are not rows.
    const int size = num_words - at < W ? num_words - at : W;
    for (int i = 0; i < size; ++i) {
      const vu words = bit_cast<vu>(square[i]);
      if (P::WORD_STEPS == 1) {
        store_words(target, words);
      } else {
        store_words(target, first_of_pairs(words));
        store_words(target + count, second_of_pairs(words));
      }
      target += P::WORD_STEPS * count;
    }
  }
}

// count <= num_vectors * W rows of x as [num_words, WORD_STEPS, num_vectors, W]; the lanes that are left are zero.
template <class P>
static void pack_panel(const typename P::element* x, int64_t x_stride, int count, int num_inputs, int num_words,
                       int num_vectors, uint32_t* target) {
  const size_t step_words = (size_t)num_vectors * W;
  for (int c = 0; c < num_vectors; ++c) {
    for (int at = 0; at < num_words; at += W) {
      vf square[W];
      for (int i = 0; i < W; ++i) {
        const int row = c * W + i;
        const typename P::element* from = x + row * x_stride + at * P::WORD_ELEMENTS;
        __builtin_prefetch(from + W * x_stride);  // the next W rows come from memory while these are packed
        square[i] = row < count ? bit_cast<vf>(load_row_words(from, num_inputs - at * P::WORD_ELEMENTS)) : zero();
      }
      transpose(square);
      const int size = num_words - at < W ? num_words - at : W;
      for (int i = 0; i < size; ++i) {
        uint32_t* to = target + (size_t)(at + i) * P::WORD_STEPS * step_words + c * W;
        const vu words = bit_cast<vu>(square[i]);
        if (P::WORD_STEPS == 1) {
          store_words(to, words);
        } else {
          store_words(to, first_of_pairs(words));
          store_words(to + step_words, second_of_pairs(words));
        }
      }
    }
  }
}
