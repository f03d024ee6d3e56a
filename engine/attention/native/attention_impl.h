// Paged attention by tiles: FlashAttention's online softmax (Dao et al. 2022) over the blocks of a block table.
//
// A work item is a tile of query rows that share one key/value head: up to MAX_ROWS rows of (token, head in group).
// It walks the keys KEY_TILE at a time. Keys and values are read where they lie in the pool and laid out for the vector
// unit in a scratch area of the thread (keys transposed); what is scratch is one tile, never a sequence. Both products,
// S = Q K^T and O += P V, then are the same small matrix product with ROWS x COLUMNS accumulators in registers.
//
// Included inside `namespace baton::BATON_ISA_NAMESPACE { namespace {`, after simd.h.

constexpr int KEY_TILE = 64;
constexpr int MAX_ROWS = 192;
constexpr int ROWS = BATON_ROWS;        // rows of the register tile
constexpr int COLUMNS = BATON_COLUMNS;  // vectors of the register tile
constexpr int CACHE_LINE_BYTES = 64;
constexpr float MINUS_INFINITY = -__builtin_inff();
constexpr float LOG2_E = 1.44269504088896340736f;

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

struct Shape {
  int head_dim;
  int padded_dim;  // head_dim rounded up to whole vectors
  int group;       // query heads a key/value head
  int tile_tokens;
};

BATON_INLINE Shape shape_of(const BatonAttention& args) {
  Shape shape;
  shape.head_dim = args.kv.head_dim;
  shape.padded_dim = (args.kv.head_dim + W - 1) / W * W;
  shape.group = args.num_heads / args.kv.num_kv_heads;
  shape.tile_tokens = shape.group >= MAX_ROWS ? 1 : MAX_ROWS / shape.group;
  return shape;
}

// Parts of the scratch area, all of 4-byte elements. `rows` is what one tile can have.
struct Scratch {
  float* queries;   // [rows, head_dim words]
  float* keys;      // [head_dim words, KEY_TILE]
  float* values;    // [KEY_TILE words, padded_dim]
  float* scores;    // [rows, KEY_TILE]
  float* weights;   // [rows, KEY_TILE words]; is `scores` itself for float words
  float* output;    // [rows, padded_dim]
  float* row_max;   // [rows]
  float* row_sum;   // [rows]
  float* zeros;     // [padded_dim], stands in for keys beyond the context
};

constexpr int ALIGN_WORDS = 16;

BATON_INLINE size_t aligned(size_t words) { return (words + ALIGN_WORDS - 1) / ALIGN_WORDS * ALIGN_WORDS; }

// Lays the parts out from `base`; with base null it only measures. Returns the number of 4-byte words.
static size_t lay_out(const Shape& shape, float* base, Scratch* scratch) {
  const size_t rows = (size_t)shape.tile_tokens * shape.group;
  size_t at = 0;
  auto take = [&](float** part, size_t words) {
    *part = base + at;
    at += aligned(words);
  };
  take(&scratch->queries, rows * shape.padded_dim);
  take(&scratch->keys, (size_t)shape.padded_dim * KEY_TILE);
  take(&scratch->values, (size_t)KEY_TILE * shape.padded_dim);
  take(&scratch->scores, rows * KEY_TILE);
  take(&scratch->weights, rows * KEY_TILE);
  take(&scratch->output, rows * shape.padded_dim);
  take(&scratch->row_max, rows);
  take(&scratch->row_sum, rows);
  take(&scratch->zeros, shape.padded_dim);
  return at;
}

// c[R, N vectors] (+)= a[R, k] b[k, N vectors], over words.
template <class Words, int R, int N>
BATON_INLINE void multiply_tile(const typename Words::word* a, int a_stride, const float* b, int b_stride, float* c,
                                int c_stride, int k_words, bool accumulate) {
  vf sum[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[r][n] = accumulate ? load(c + r * c_stride + n * W) : zero();
  for (int k = 0; k < k_words; ++k) {
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

template <class Words, int R>
static void multiply_rows(const typename Words::word* a, int a_stride, const float* b, int b_stride, float* c,
                          int c_stride, int columns, int k_words, bool accumulate) {
  int n = 0;
  for (; n + COLUMNS * W <= columns; n += COLUMNS * W)
    multiply_tile<Words, R, COLUMNS>(a, a_stride, b + n, b_stride, c + n, c_stride, k_words, accumulate);
  for (; n < columns; n += W)
    multiply_tile<Words, R, 1>(a, a_stride, b + n, b_stride, c + n, c_stride, k_words, accumulate);
}

// c[rows, columns] (+)= a[rows, k] b[k, columns]; columns is a multiple of W.
template <class Words>
static void multiply(const float* a_base, int a_stride, const float* b, int b_stride, float* c, int c_stride, int rows,
                     int columns, int k_words, bool accumulate) {
  const typename Words::word* a = reinterpret_cast<const typename Words::word*>(a_base);
  for (; rows >= ROWS; rows -= ROWS, a += (size_t)ROWS * a_stride, c += (size_t)ROWS * c_stride)
    multiply_rows<Words, ROWS>(a, a_stride, b, b_stride, c, c_stride, columns, k_words, accumulate);
  switch (rows) {
    case 5: return multiply_rows<Words, 5>(a, a_stride, b, b_stride, c, c_stride, columns, k_words, accumulate);
    case 4: return multiply_rows<Words, 4>(a, a_stride, b, b_stride, c, c_stride, columns, k_words, accumulate);
    case 3: return multiply_rows<Words, 3>(a, a_stride, b, b_stride, c, c_stride, columns, k_words, accumulate);
    case 2: return multiply_rows<Words, 2>(a, a_stride, b, b_stride, c, c_stride, columns, k_words, accumulate);
    case 1: return multiply_rows<Words, 1>(a, a_stride, b, b_stride, c, c_stride, columns, k_words, accumulate);
  }
}

// W consecutive words of a row of T: floats (widened from T), or pairs of bfloat16 as they lie.
template <class Words, class T>
BATON_INLINE vf load_words(const T* row, int num_elements) {
  if constexpr (Words::PER_WORD == 1) {
    return load_up_to(row, num_elements);
  } else {
    return load_up_to(reinterpret_cast<const float*>(row), num_elements / 2);
  }
}

template <class Words, class T>
static void pack_queries(const BatonAttention& args, const BatonStep& step, const Shape& shape,
                         const AttentionTile& tile, int words, float* queries) {
  const int tokens_before = step.query_starts[tile.sequence];
  for (int token = tile.begin; token < tile.end; ++token) {
    const T* q = static_cast<const T*>(args.q) + (tokens_before + token) * args.q_token_stride +
                 (size_t)tile.kv_head * shape.group * shape.head_dim;
    for (int g = 0; g < shape.group; ++g, q += shape.head_dim, queries += words)
      for (int at = 0; at < words; at += W)
        store_up_to(queries + at, load_words<Words>(q + at * Words::PER_WORD, shape.head_dim - at * Words::PER_WORD),
                    words - at);
  }
}

// Finds the key rows of positions first .. first + KEY_TILE - 1; those from `count` on become rows of zeros.
template <class T>
static void find_rows(const BatonAttention& args, const BatonStep& step, const AttentionTile& tile, int first,
                      int count, const T* zeros, const T** rows) {
  const BatonKVLayer& kv = args.kv;
  const int32_t* table = step.block_tables + step.table_starts[tile.sequence];
  const T* head = static_cast<const T*>(kv.data) + tile.kv_head * kv.head_stride;
  int index = first / kv.block_size;
  int slot = first % kv.block_size;
  for (int i = 0; i < count; ++index, slot = 0) {
    const T* block = head + table[index] * kv.block_stride;
    for (; slot < kv.block_size && i < count; ++slot, ++i) rows[i] = block + slot * kv.slot_stride;
  }
  for (int i = count; i < KEY_TILE; ++i) rows[i] = zeros;
}

// Where the key tiles of a query tile begin: at the tile of the first position that its first row sees. Tiles stand at
// multiples of KEY_TILE whatever the rows are, so that each row sums its keys in the same groups.
BATON_INLINE int first_key_tile(const BatonAttention& args, const BatonStep& step, const AttentionTile& tile) {
  const int position = step.context_starts[tile.sequence] + tile.begin;
  const int first = args.window > 0 && position >= args.window ? position - args.window + 1 : 0;
  return first / KEY_TILE * KEY_TILE;
}

// The key rows that are packed after those from `first` on: the tile's next ones, or those that `next` begins with. In
// decode each is read once, from another page, which the machine's own prefetcher does not foresee; so packing asks
// the cache for them, a row at a time, as it goes.
template <class T>
static void find_rows_ahead(const BatonAttention& args, const BatonStep& step, const AttentionTile& tile,
                            const AttentionTile* next, int first, const T* zeros, const T** rows) {
  const int context_end = step.context_starts[tile.sequence] + tile.end;
  const AttentionTile* ahead = first + KEY_TILE < context_end ? &tile : next;
  if (ahead) {
    first = ahead == &tile ? first + KEY_TILE : first_key_tile(args, step, *ahead);
    const int count = step.context_starts[ahead->sequence] + ahead->end - first;
    find_rows(args, step, *ahead, first, count < KEY_TILE ? count : KEY_TILE, zeros, rows);
  } else {
    for (int i = 0; i < KEY_TILE; ++i) rows[i] = zeros;
  }
}

template <class Words, class T>
static void pack_keys(const T* const* rows, const T* const* ahead, int count, int head_dim, float* keys) {
  const int words = head_dim / Words::PER_WORD;
  for (int group = 0; group < count; group += W) {
    for (int at = 0; at < words; at += W) {
      vf square[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        __builtin_prefetch(ahead[group + i] + at * Words::PER_WORD);
        square[i] = load_words<Words>(rows[group + i] + at * Words::PER_WORD, head_dim - at * Words::PER_WORD);
      }
      transpose(square);
      const int present = words - at < W ? words - at : W;
      for (int i = 0; i < present; ++i) store(keys + (size_t)(at + i) * KEY_TILE + group, square[i]);
    }
  }
}

// Values as rows of words: row k holds the value of key k, or of keys 2k (lower half) and 2k + 1.
template <class Words, class T>
static void pack_values(const T* const* rows, const T* const* ahead, int64_t kv_stride, int count, const Shape& shape,
                        const T* zeros, float* values) {
  for (int key = 0; key < count; key += Words::PER_WORD, values += shape.padded_dim) {
    const T* row = rows[key] + kv_stride;
    for (int i = 0; i < Words::PER_WORD; ++i)
      for (int at = 0; at < shape.head_dim; at += CACHE_LINE_BYTES / (int)sizeof(T))
        __builtin_prefetch(ahead[key + i] + kv_stride + at);
    if constexpr (Words::PER_WORD == 1) {
      for (int at = 0; at < shape.padded_dim; at += W) store(values + at, load_up_to(row + at, shape.head_dim - at));
    } else {
      const T* next = key + 1 < count ? rows[key + 1] + kv_stride : zeros;
      for (int at = 0; at < shape.padded_dim; at += W) {
        const vu low = bit_cast<vu>(load_up_to(row + at, shape.head_dim - at)) >> 16;
        const vu high = bit_cast<vu>(load_up_to(next + at, shape.head_dim - at));
        store(values + at, bit_cast<vf>(low | high));
      }
    }
  }
}

BATON_INLINE void store_weights(FloatWords, float* row, int at, vf p) { store(row + at, p); }
#ifdef BATON_BF16_PAIRS
BATON_INLINE void store_weights(PairWords, float* row, int at, vf p) {
  const __m256bh half = _mm512_cvtneps_pbh((__m512)p);
  __builtin_memcpy(reinterpret_cast<uint16_t*>(row) + at, &half, sizeof half);
}
#endif

// Folds one tile of scores into the running softmax of a row that sees keys begin .. end - 1 of it: leaves the weights
// exp(score - maximum), and scales what was summed before to the new maximum. Other keys get weights of exactly zero,
// which add nothing to any sum: a row's bits do not depend on how far its tile reaches.
template <class Words>
BATON_INLINE void softmax_row(float* scores, float* weights, int begin, int end, float scale, float* row_max,
                              float* row_sum, float* output, int padded_dim) {
  constexpr int N = KEY_TILE / W;
  if (begin >= end) {
    for (int at = 0; at < KEY_TILE / Words::PER_WORD; at += W) store(weights + at, zero());
    return;
  }
  const bool is_masked = begin > 0 || end < KEY_TILE;
  vf score[N];
  vf top = splat(MINUS_INFINITY);
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    score[n] = load(scores + n * W);
    if (is_masked) {
      const vi key = lane_index() + n * W;
      score[n] = (key >= vi{} + begin) & (key < vi{} + end) ? score[n] : splat(MINUS_INFINITY);
    }
    top = max(top, score[n]);
  }
  const float tile_max = max_lanes(top) * scale;
  const float before = *row_max;
  const float now = tile_max > before ? tile_max : before;
  vf sum = zero();
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    const vf p = exp2(score[n] * scale - now);
    sum += p;
    store_weights(Words(), weights, n * W, p);
  }
  if (now > before) {
    const float shrink = exp2(splat(before - now))[0];
    *row_max = now;
    *row_sum = *row_sum * shrink + sum_lanes(sum);
    for (int at = 0; at < padded_dim; at += W) store(output + at, load(output + at) * shrink);
  } else {
    *row_sum += sum_lanes(sum);
  }
}

template <class T>
static void write_output(const BatonAttention& args, const BatonStep& step, const Shape& shape,
                         const AttentionTile& tile, const Scratch& scratch) {
  const int tokens_before = step.query_starts[tile.sequence];
  const float* row = scratch.output;
  int r = 0;
  for (int token = tile.begin; token < tile.end; ++token) {
    T* out = static_cast<T*>(args.out) + (tokens_before + token) * args.out_token_stride +
             (size_t)tile.kv_head * shape.group * shape.head_dim;
    for (int g = 0; g < shape.group; ++g, ++r, row += shape.padded_dim, out += shape.head_dim) {
      const float inverse = 1.0f / scratch.row_sum[r];
      for (int at = 0; at < shape.head_dim; at += W)
        store_up_to(out + at, load(row + at) * inverse, shape.head_dim - at);
    }
  }
}

template <class T>
static void attend(const BatonAttention& args, const BatonStep& step, const AttentionTile& tile,
                   const AttentionTile* next, float* base) {
  typedef typename WordsOf<T>::type Words;
  const Shape shape = shape_of(args);
  Scratch scratch;
  lay_out(shape, base, &scratch);
  float* weights = Words::PER_WORD == 1 ? scratch.scores : scratch.weights;
  const int words = shape.head_dim / Words::PER_WORD;
  const int rows = (tile.end - tile.begin) * shape.group;
  const int first_position = step.context_starts[tile.sequence] + tile.begin;
  const int context_end = step.context_starts[tile.sequence] + tile.end;
  const float scale = args.scale * LOG2_E;
  for (int i = 0; i < shape.padded_dim; ++i) scratch.zeros[i] = 0.0f;
  for (int i = 0; i < rows * shape.padded_dim; ++i) scratch.output[i] = 0.0f;
  for (int r = 0; r < rows; ++r) {
    scratch.row_max[r] = MINUS_INFINITY;
    scratch.row_sum[r] = 0.0f;
  }
  const T* zeros = reinterpret_cast<const T*>(scratch.zeros);
  pack_queries<Words, T>(args, step, shape, tile, words, scratch.queries);
  for (int first = first_key_tile(args, step, tile); first < context_end; first += KEY_TILE) {
    const int count = context_end - first < KEY_TILE ? context_end - first : KEY_TILE;
    const int columns = (count + W - 1) / W * W;
    const T* key_rows[KEY_TILE];
    find_rows(args, step, tile, first, count, zeros, key_rows);
    const T* ahead[KEY_TILE];
    find_rows_ahead(args, step, tile, next, first, zeros, ahead);
    pack_keys<Words>(key_rows, ahead, count, shape.head_dim, scratch.keys);
    pack_values<Words>(key_rows, ahead, args.kv.kv_stride, count, shape, zeros, scratch.values);
    multiply<Words>(scratch.queries, words, scratch.keys, KEY_TILE, scratch.scores, KEY_TILE, rows, columns, words,
                    false);
    for (int r = 0; r < rows; ++r) {
      const int position = first_position + r / shape.group - first;
      const int begin = args.window > 0 && position >= args.window ? position - args.window + 1 : 0;
      softmax_row<Words>(scratch.scores + r * KEY_TILE, weights + r * (KEY_TILE / Words::PER_WORD), begin,
                         position < KEY_TILE ? position + 1 : KEY_TILE, scale, scratch.row_max + r,
                         scratch.row_sum + r, scratch.output + (size_t)r * shape.padded_dim, shape.padded_dim);
    }
    multiply<Words>(weights, KEY_TILE / Words::PER_WORD, scratch.values, shape.padded_dim, scratch.output,
                    shape.padded_dim, rows, shape.padded_dim, (count + Words::PER_WORD - 1) / Words::PER_WORD, true);
  }
  write_output<T>(args, step, shape, tile, scratch);
}

static size_t attention_scratch_size_bytes(const BatonAttention& args) {
  Scratch scratch;
  return lay_out(shape_of(args), nullptr, &scratch) * sizeof(float);
}

static int32_t attention_tile_tokens(const BatonAttention& args) { return shape_of(args).tile_tokens; }

static void attention_tile(const BatonAttention& args, const BatonStep& step, const AttentionTile& tile,
                           const AttentionTile* next, void* scratch) {
  if (args.kv.dtype == BATON_BFLOAT16) {
    attend<bf16>(args, step, tile, next, static_cast<float*>(scratch));
  } else {
    attend<float>(args, step, tile, next, static_cast<float*>(scratch));
  }
}
