// Paged attention by tiles: FlashAttention's online softmax (Dao et al. 2022) over the blocks of a block table.
//
// A work item is a tile of query rows that share one key/value head: up to MAX_ROWS rows of (token, head in group).
// It walks the keys KEY_TILE at a time. Keys and values are read where they lie in the pool and laid out for the vector
// unit in a scratch area of the thread (keys transposed); what is scratch is one tile, never a sequence. A few rows at a
// time, so that all they need stays in the first cache, then go through both products, S = Q K^T and O += P V: the same
// small matrix product with ROWS x COLUMNS accumulators in registers.
//
// A row's bits do not depend on the rows beside it. Key tiles stand at multiples of KEY_TILE whatever the rows are, so
// that each row sums its keys in the same groups, and keys that a row does not see add exactly nothing to its sums.
//
// Included inside `namespace baton::BATON_ISA_NAMESPACE { namespace {`, after few_rows_impl.h.

constexpr int MAX_ROWS = 192;
constexpr int PASS_ROWS = 4 * ROWS;     // rows that go through both products together
constexpr float MAX_GROWTH = 8.0f;  // of a row's scores over its reference, as a power of two
constexpr float LEAST_SCORE = -3e38f;  // of a key that is not seen; not infinite, so that differences are numbers
constexpr float LOG2_E = 1.44269504088896340736f;

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
  float* scores;    // [PASS_ROWS, KEY_TILE]
  float* weights;   // [PASS_ROWS, KEY_TILE words]; is `scores` itself for float words
  float* output;    // [rows, padded_dim]
  float* reference;  // [rows]: see softmax_row
  float* row_sum;   // [rows, W]: each lane has summed its own keys
  int32_t* positions;  // [rows]
  float* staging;   // [2 * KEY_TILE, head_dim], keys and values that do not lie together
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
  take(&scratch->scores, PASS_ROWS * KEY_TILE);
  take(&scratch->weights, PASS_ROWS * KEY_TILE);
  take(&scratch->output, rows * shape.padded_dim);
  take(&scratch->reference, rows);
  take(&scratch->row_sum, rows * W);
  float* positions;
  take(&positions, rows);
  scratch->positions = reinterpret_cast<int32_t*>(positions);
  take(&scratch->staging, 2 * KEY_TILE * (size_t)shape.padded_dim);
  return at;
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

// Where the key tiles of a query tile begin: at the tile of the first position that its first row sees.
BATON_INLINE int first_key_tile(const BatonAttention& args, const BatonStep& step, const AttentionTile& tile) {
  const int position = step.context_starts[tile.sequence] + tile.begin;
  const int first = args.window > 0 && position >= args.window ? position - args.window + 1 : 0;
  return first / KEY_TILE * KEY_TILE;
}

template <class T>
BATON_INLINE KeySource<T> key_source(const BatonAttention& args, const BatonStep& step, const AttentionTile& tile) {
  return {args.kv, static_cast<const T*>(args.kv.data) + tile.kv_head * args.kv.head_stride,
          step.block_tables + step.table_starts[tile.sequence], step.context_starts[tile.sequence] + tile.end};
}

BATON_INLINE void store_weights(FloatWords, float* row, int at, vf p) { store(row + at, p); }
#ifdef BATON_BF16_PAIRS
BATON_INLINE void store_weights(PairWords, float* row, int at, vf p) {
  const __m256bh half = _mm512_cvtneps_pbh((__m512)p);
  __builtin_memcpy(reinterpret_cast<uint16_t*>(row) + at, &half, sizeof half);
}
#endif

// Folds one tile of scores into the running softmax of a row that sees keys begin .. end - 1 of it: leaves the weights
// 2^(score - reference). The reference is a maximum that lags behind: what was summed before is scaled to a new one only
// where a score exceeds it by MAX_GROWTH. The quotient is the same, weights up to 2^MAX_GROWTH lose nothing in floating
// point, and the common case needs neither the largest lane nor a branch that is hard to foresee.
template <class Words>
BATON_INLINE void softmax_row(const float* scores, float* weights, int begin, int end, float scale, float* reference,
                              float* row_sum, float* output, int padded_dim) {
  constexpr int N = KEY_TILE / W;
  if (begin >= end) {
    for (int at = 0; at < KEY_TILE / Words::PER_WORD; at += W) store(weights + at, zero());
    return;
  }
  vf score[N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) score[n] = load(scores + n * W);
  if (begin > 0 || end < KEY_TILE) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const vi key = lane_index() + n * W;
      score[n] = (key >= vi{} + begin) & (key < vi{} + end) ? score[n] : splat(LEAST_SCORE);
    }
  }
  vf top = score[0];
#pragma GCC unroll 16
  for (int n = 1; n < N; ++n) top = max(top, score[n]);
  const float before = *reference;
  vf sum = load(row_sum);
  if (any_greater(top * scale, splat(before + MAX_GROWTH))) {
    const float tile_max = max_lanes(top) * scale;
    const vf shrink = exp2(splat(before - tile_max));
    *reference = tile_max;
    sum *= shrink;
    for (int at = 0; at < padded_dim; at += W) store(output + at, load(output + at) * shrink);
  }
  const float now = *reference;
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    const vf p = exp2(score[n] * scale - now);
    sum += p;
    store_weights(Words(), weights, n * W, p);
  }
  store(row_sum, sum);
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
      const float inverse = 1.0f / sum_lanes(load(scratch.row_sum + r * W));
      for (int at = 0; at < shape.head_dim; at += W)
        store_up_to(out + at, load(row + at) * inverse, shape.head_dim - at);
    }
  }
}

// A few rows, and what they see of the key tile that begins at `first`.
struct Pass {
  int begin;
  int rows;
  int num_keys;  // that the last row sees; 0 if the tile lies outside what any of them sees
};

BATON_INLINE Pass pass_of(const BatonAttention& args, const Scratch& scratch, int first, int begin, int end) {
  const int last_end = scratch.positions[end - 1] - first + 1;
  const bool is_past = args.window > 0 && scratch.positions[begin] - args.window + 1 >= first + KEY_TILE;
  const int num_keys = last_end <= 0 || is_past ? 0 : last_end < KEY_TILE ? last_end : KEY_TILE;
  return {begin, end - begin, num_keys};
}

// From the scores of the rows to their softmax weights.
template <class Words>
static void weigh_keys(const BatonAttention& args, const Shape& shape, const Scratch& scratch, int first,
                       const Pass& pass, float* weights) {
  for (int r = 0; r < pass.rows; ++r) {
    const int row = pass.begin + r;
    const int end = scratch.positions[row] - first + 1;
    const int begin = args.window > 0 && end > args.window ? end - args.window : 0;
    softmax_row<Words>(scratch.scores + r * KEY_TILE, weights + r * (KEY_TILE / Words::PER_WORD), begin,
                       end < KEY_TILE ? end : KEY_TILE, args.scale * LOG2_E, scratch.reference + row,
                       scratch.row_sum + (size_t)row * W, scratch.output + (size_t)row * shape.padded_dim,
                       shape.padded_dim);
  }
}

// Everything that the rows do with the key tile that begins at `first`.
template <class Words, class T, class Between>
static void attend_tile(const BatonAttention& args, const Shape& shape, const Scratch& scratch, const KeyTile<T>& keys,
                        int first, int rows, Between between) {
  const int words = shape.head_dim / Words::PER_WORD;
  float* weights = Words::PER_WORD == 1 ? scratch.scores : scratch.weights;
  pack_key_tile<Words>(keys, shape.head_dim, scratch.keys);
  for (int row = 0; row < rows; row += PASS_ROWS) {
    const Pass pass = pass_of(args, scratch, first, row, row + PASS_ROWS < rows ? row + PASS_ROWS : rows);
    if (pass.num_keys > 0) {
      multiply<Words>(scratch.queries + (size_t)row * words, words, scratch.keys, KEY_TILE, scratch.scores, KEY_TILE,
                      pass.rows, (pass.num_keys + W - 1) / W * W, words, false, between);
      weigh_keys<Words>(args, shape, scratch, first, pass, weights);
    }
    // Only now: it fills the time in which the weights, each of which waits for the one before, are computed.
    if (row == 0) pack_value_tile<Words>(keys, shape.head_dim, shape.padded_dim, scratch.values);
    if (pass.num_keys > 0)
      multiply<Words>(weights, KEY_TILE / Words::PER_WORD, scratch.values, shape.padded_dim,
                      scratch.output + (size_t)row * shape.padded_dim, shape.padded_dim, pass.rows, shape.padded_dim,
                      (pass.num_keys + Words::PER_WORD - 1) / Words::PER_WORD, true, between);
  }
}

// The same for R rows of DIM elements, by the products for few rows.
template <class Words, int DIM, int R, class T, class Between>
static void attend_tile_by_few(const BatonAttention& args, const Shape& shape, const Scratch& scratch,
                               const KeyTile<T>& keys, int first, Between between) {
  typedef typename Words::word word;
  const Pass pass = pass_of(args, scratch, first, 0, R);
  if (pass.num_keys == 0) return;
  float* weights = Words::PER_WORD == 1 ? scratch.scores : scratch.weights;
  for (int at = 0; at < DIM / Words::PER_WORD; at += W)
    for (int g = 0; g < keys.num_groups; ++g)
      add_scores<Words, DIM, R>(keys.groups[g], at, reinterpret_cast<const word*>(scratch.queries),
                                scratch.scores + g * W, between);
  weigh_keys<Words>(args, shape, scratch, first, pass, weights);
  for (int at = 0; at < DIM; at += VALUE_COLUMNS * W)
    add_values<Words, DIM, R>(keys, at, reinterpret_cast<const word*>(weights), scratch.output + at, between);
}

template <class Words, int DIM, class T, class Between>
static void attend_few(const BatonAttention& args, const Shape& shape, const Scratch& scratch, const KeyTile<T>& keys,
                       int first, int rows, Between between) {
  switch (rows) {
    case 6: return attend_tile_by_few<Words, DIM, 6>(args, shape, scratch, keys, first, between);
    case 5: return attend_tile_by_few<Words, DIM, 5>(args, shape, scratch, keys, first, between);
    case 4: return attend_tile_by_few<Words, DIM, 4>(args, shape, scratch, keys, first, between);
    case 3: return attend_tile_by_few<Words, DIM, 3>(args, shape, scratch, keys, first, between);
    case 2: return attend_tile_by_few<Words, DIM, 2>(args, shape, scratch, keys, first, between);
    default: return attend_tile_by_few<Words, DIM, 1>(args, shape, scratch, keys, first, between);
  }
}

template <class T>
static void attend(const BatonAttention& args, const BatonStep& step, const AttentionTile& tile,
                   const AttentionTile* next, float* base) {
  typedef typename WordsOf<T>::type Words;
  const Shape shape = shape_of(args);
  Scratch scratch;
  lay_out(shape, base, &scratch);
  const int rows = (tile.end - tile.begin) * shape.group;
  for (int i = 0; i < rows * shape.padded_dim; ++i) scratch.output[i] = 0.0f;
  for (int i = 0; i < rows * W; ++i) scratch.row_sum[i] = 0.0f;
  for (int r = 0; r < rows; ++r) scratch.reference[r] = LEAST_SCORE;
  for (int token = tile.begin, r = 0; token < tile.end; ++token)
    for (int g = 0; g < shape.group; ++g, ++r) scratch.positions[r] = step.context_starts[tile.sequence] + token;
  pack_queries<Words, T>(args, step, shape, tile, shape.head_dim / Words::PER_WORD, scratch.queries);
  Fetcher fetcher;
  KeyTile<T> keys;
  const KeySource<T> source = key_source<T>(args, step, tile);
  const KeySource<T> source_of_next = key_source<T>(args, step, next ? *next : tile);
  const KeyPlace<T> start_of_next = {&source_of_next,
                                     next ? first_key_tile(args, step, *next) : source_of_next.end};
  auto place_after = [&](const KeyPlace<T>& place) __attribute__((always_inline)) -> KeyPlace<T> {
    const KeyPlace<T> after = {place.source, place.position + KEY_TILE};
    return after.position < after.source->end || after.source == &source_of_next ? after : start_of_next;
  };
  for (int first = first_key_tile(args, step, tile); first < source.end; first += KEY_TILE) {
    const KeyPlace<T> ahead = place_after({&source, first});
    Fetcher::begin(fetcher, ahead);
    find_key_tile(source, first, reinterpret_cast<T*>(scratch.staging), &keys);
    if (rows > ROWS) {
      while (Fetcher::step(fetcher)) continue;
      attend_tile<Words>(args, shape, scratch, keys, first, rows, [] {});
      continue;
    }
    auto fetch = [&]() __attribute__((always_inline)) { Fetcher::step(fetcher); };
    with_dim(shape.head_dim, args.kv.slot_stride, [&](auto constant) __attribute__((always_inline)) {
      if constexpr (constant.value > 0) {
        attend_few<Words, constant.value>(args, shape, scratch, keys, first, rows, fetch);
      } else {
        attend_tile<Words>(args, shape, scratch, keys, first, rows, fetch);
      }
    });
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
