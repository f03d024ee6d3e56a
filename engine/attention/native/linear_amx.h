// linear_tiles.h's tile of many rows, with AMX: its sums are 2 x C of AMX's tiles, whose rows are outputs and whose
// columns are rows of x. The weight's rows are the left operand where they lie, the packed rows of x the right one. It
// serves one row as it serves many, since reading the weight is far slower than multiplying it with 16 rows.
//
// Included by linear_tiles.h.

constexpr int GRANULE_WORDS = 16;  // of a row: a row of a tile
constexpr int TILE_OUTPUTS = 2 * TILE_ROWS;
static_assert(W == TILE_ROW_BYTES / 4, "a vector is a row of a tile");

template <class P, int C>
static void many_rows_tile(WordRows weight, const uint32_t* x, int num_steps, const Ahead& ahead, bool is_first,
                           float* partial) {
  static_assert(C <= 2 && P::WORD_STEPS == 1, "");
  constexpr size_t STEP_BYTES = C * TILE_ROW_BYTES;
  float* const upper = partial + TILE_ROWS * C * W;  // of the second half of the outputs
  if (is_first) {
    BATON_TILE_ZERO(0);
    BATON_TILE_ZERO(1);
    BATON_TILE_ZERO(2);
    BATON_TILE_ZERO(3);
  } else {
    BATON_TILE_LOAD(0, partial, STEP_BYTES);
    BATON_TILE_LOAD(2, upper, STEP_BYTES);
    if (C == 2) {
      BATON_TILE_LOAD(1, partial + W, STEP_BYTES);
      BATON_TILE_LOAD(3, upper + W, STEP_BYTES);
    }
  }
  for (int at = 0; at < num_steps; at += GRANULE_WORDS, x += GRANULE_WORDS * C * W, weight.data += TILE_ROW_BYTES) {
    fetch(ahead, at * 4);
    BATON_TILE_LOAD(4, weight.data, weight.stride_bytes);
    BATON_TILE_LOAD(6, x, STEP_BYTES);
    BATON_TILE_MULTIPLY(0, 4, 6);
    if (C == 2) {
      BATON_TILE_LOAD(7, x + W, STEP_BYTES);
      BATON_TILE_MULTIPLY(1, 4, 7);
    }
    BATON_TILE_LOAD(5, weight.data + TILE_ROWS * weight.stride_bytes, weight.stride_bytes);
    BATON_TILE_MULTIPLY(2, 5, 6);
    if (C == 2) BATON_TILE_MULTIPLY(3, 5, 7);
  }
  BATON_TILE_STORE(0, partial, STEP_BYTES);
  BATON_TILE_STORE(2, upper, STEP_BYTES);
  if (C == 2) {
    BATON_TILE_STORE(1, partial + W, STEP_BYTES);
    BATON_TILE_STORE(3, upper + W, STEP_BYTES);
  }
}
