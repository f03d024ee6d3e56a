// The two products of attention for a few query rows, as in decode: from the pool's rows straight into registers.
//
// With many rows a tile of keys is laid out once in the scratch area and multiplied many times. With a few, laying it out
// costs more than the products; here each group of W keys is transposed in registers and used at once. Every sum adds the
// same terms in the same order as the product of many rows, so that a row's bits do not tell which of the two it took.
//
// Both go through all groups of the tile for one part of the head dimension, then for the next. The groups lie on
// different pages, and going from page to page in short turns keeps the machine's own prefetcher at work on all of them.
//
// Included inside `namespace baton::BATON_ISA_NAMESPACE { namespace {`, after pack_impl.h.

constexpr int WORDS_A_FETCH = 4;  // words of keys between two calls of `between`
constexpr int PAIRS_A_FETCH = 2;  // rows of values' words between two of them
constexpr int VALUE_COLUMNS = 2;  // vectors of the output at a time: what a cache line of bfloat16 holds

// scores[R, KEY_TILE]: what W words of the keys from `at` on add to the columns of one group.
template <class Words, int DIM, int R, class T, class Between>
BATON_INLINE void add_scores(const KeyGroup<T>& group, int at, const typename Words::word* queries, float* scores,
                             Between between) {
  vf sum[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r] = at == 0 ? zero() : load(scores + r * KEY_TILE);
  vf square[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) square[i] = load_words<Words>(group.keys + i * DIM + at * Words::PER_WORD, DIM);
  transpose(square);
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    if (i % WORDS_A_FETCH == 0) between();
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      sum[r] = Words::multiply_add(sum[r], queries[r * (DIM / Words::PER_WORD) + at + i], square[i]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(scores + r * KEY_TILE, sum[r]);
}

// One row of words from PER_WORD rows of values: columns 0 .. VALUE_COLUMNS * W - 1 of it.
template <class T>
BATON_INLINE void value_columns(FloatWords, const T* row, int, vf (&column)[VALUE_COLUMNS]) {
#pragma GCC unroll 4
  for (int n = 0; n < VALUE_COLUMNS; ++n) column[n] = load(row + n * W);
}
#ifdef BATON_BF16_PAIRS
BATON_INLINE void value_columns(PairWords, const bf16* row, int stride, vf (&column)[VALUE_COLUMNS]) {
  static_assert(VALUE_COLUMNS == 2, "what interleave gives");
  interleave(row, row + stride, &column[0], &column[1]);
}
#endif

// output[R, DIM] += weights[R, KEY_TILE words] values: VALUE_COLUMNS vectors of it, over all groups of the tile.
template <class Words, int DIM, int R, class T, class Between>
BATON_INLINE void add_values(const KeyTile<T>& tile, int at, const typename Words::word* weights, float* output,
                             Between between) {
  constexpr int WORDS = KEY_TILE / Words::PER_WORD;
  vf sum[R][VALUE_COLUMNS];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < VALUE_COLUMNS; ++n) sum[r][n] = load(output + r * DIM + n * W);
  for (int g = 0; g < tile.num_groups; ++g) {
    const T* row = tile.groups[g].values + at;
    for (int k = 0; k < W / Words::PER_WORD; ++k, row += Words::PER_WORD * DIM, ++weights) {
      if (k % PAIRS_A_FETCH == 0) between();
      vf column[VALUE_COLUMNS];
      value_columns(Words(), row, DIM, column);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < VALUE_COLUMNS; ++n)
          sum[r][n] = Words::multiply_add(sum[r][n], weights[r * WORDS], column[n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < VALUE_COLUMNS; ++n) store(output + r * DIM + n * W, sum[r][n]);
}
