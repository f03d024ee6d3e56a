// The output head: every row of x with every row of the weight, both bfloat16, summed and returned in float32.
//
// The weight is read once, where it lies: W of its rows at a time stay in the cache while all rows of x pass by, and the
// next W are fetched meanwhile. A tile of R rows of x and W / R rows of the weight has W vectors of sums in
// registers, which become one vector of W outputs at the end. An output's sum has the same order in every tile.
//
// Included inside `namespace baton::BATON_ISA_NAMESPACE { namespace {`, after simd.h.

constexpr int PAIRED = 2 * W;               // bfloat16 elements of a vector of words, two neighbours a word
constexpr int TILE_ROWS = W >= 16 ? 4 : 2;  // of x: as near to a square tile as can be

BATON_INLINE vu load_pairs(const bf16* p) {
  vu v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// The first n < PAIRED elements; the others are zero.
BATON_INLINE vu load_pairs_part(const bf16* p, int n) {
  bf16 elements[PAIRED] = {};
  __builtin_memcpy(elements, p, n * sizeof(bf16));
  return load_pairs(elements);
}

// sum + the products of both halves of each word.
BATON_INLINE vf add_pair_products(vf sum, vu a, vu b) {
#ifdef BATON_BF16_PAIRS
  return (vf)_mm512_dpbf16_ps((__m512)sum, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b));
#else
  sum += bit_cast<vf>(a << 16) * bit_cast<vf>(b << 16);
  return sum + bit_cast<vf>(a & 0xffff0000u) * bit_cast<vf>(b & 0xffff0000u);
#endif
}

// Lane i of the result is the sum of the lanes of v[i]. Each pass adds neighbouring lanes of two vectors into one.
BATON_INLINE vf sum_lanes_of_each(vf (&v)[W]) {
  const vi even = lane_index() * 2;
  const vi odd = even + 1;
#pragma GCC unroll 4
  for (int count = W / 2; count > 0; count /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i)
      v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], even) + __builtin_shuffle(v[2 * i], v[2 * i + 1], odd);
  return v[0];
}

// out[r, c] for R rows of x and the W / R rows of the weight at `weights`, of which the first `count` are stored.
template <int R>
BATON_INLINE void logits_tile(const bf16* x, const bf16* const* weights, int size, float* out, size_t out_stride,
                              int count) {
  constexpr int C = W / R;
  vf sums[W] = {};
  auto add = [&](int at, auto load_some) __attribute__((always_inline)) {
    vu rows[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) rows[r] = load_some(x + (size_t)r * size + at);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const vu column = load_some(weights[c] + at);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r * C + c] = add_pair_products(sums[r * C + c], rows[r], column);
    }
  };
  int at = 0;
  for (; at + PAIRED <= size; at += PAIRED)
    add(at, [](const bf16* p) __attribute__((always_inline)) { return load_pairs(p); });
  if (at < size)
    add(at, [&](const bf16* p) __attribute__((always_inline)) { return load_pairs_part(p, size - at); });
  float lanes[W];
  store(lanes, sum_lanes_of_each(sums));
  for (int r = 0; r < R; ++r) __builtin_memcpy(out + r * out_stride, lanes + r * C, count * sizeof(float));
}

// The bytes that are wanted after those at hand. Each tile fetches a part of them, so that reading the weight and
// computing overlap evenly.
struct Ahead {
  const char* next;
  const char* stop;
  size_t bytes_per_tile;
};

BATON_INLINE void fetch(Ahead& ahead) {
  const char* part = ahead.next + ahead.bytes_per_tile < ahead.stop ? ahead.next + ahead.bytes_per_tile : ahead.stop;
  for (; ahead.next < part; ahead.next += CACHE_LINE_BYTES) __builtin_prefetch(ahead.next);
}

// R rows of x at a time, from `row` on and while there are so many; returns the first row that is left.
template <int R>
static int logits_rows(const BatonLogits& args, int row, const bf16* const* weights, int num_weights, float* out,
                       Ahead& ahead) {
  constexpr int C = W / R;
  for (; row + R <= args.num_rows; row += R) {
    const bf16* x = static_cast<const bf16*>(args.x) + (size_t)row * args.size;
    for (int c = 0; c < num_weights; c += C) {
      fetch(ahead);
      logits_tile<R>(x, weights + c, args.size, out + (size_t)row * args.vocab_size + c, args.vocab_size,
                     num_weights - c < C ? num_weights - c : C);
    }
  }
  return row;
}

// Columns begin .. end - 1 of the output, at most W.
static void logits_columns(const BatonLogits& args, int32_t begin, int32_t end) {
  const size_t size = args.size;
  const bf16* weight = static_cast<const bf16*>(args.weight);
  const bf16* weights[W];
  for (int i = 0; i < W; ++i) weights[i] = weight + (begin + i < end ? begin + i : end - 1) * size;
  const int32_t next_end = end + W < args.vocab_size ? end + W : args.vocab_size;
  Ahead ahead;
  ahead.next = reinterpret_cast<const char*>(weight + end * size);
  ahead.stop = reinterpret_cast<const char*>(weight + next_end * size);
  ahead.bytes_per_tile = (ahead.stop - ahead.next) / args.num_rows + 1;  // there are as many tiles as rows
  int row = logits_rows<TILE_ROWS>(args, 0, weights, end - begin, args.out + begin, ahead);
  if (TILE_ROWS > 2) row = logits_rows<2>(args, row, weights, end - begin, args.out + begin, ahead);
  logits_rows<1>(args, row, weights, end - begin, args.out + begin, ahead);
}

static void logits(const BatonLogits& args, int32_t begin, int32_t end) {
  if (args.num_rows == 0) return;
  for (int32_t at = begin; at < end; at += W) logits_columns(args, at, at + W < end ? at + W : end);
}
