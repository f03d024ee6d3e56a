// out = x weight^T + bias, with the weight as it lies in the checkpoint: a row an output.
//
// A word is 32 bits of a row: one float32, or two bfloat16. An output is the sum over the words of its two rows, first
// to last, in one lane of a vector, whatever the other lanes do. So its bits depend on those rows alone: not on the
// tile, the item or the thread that computes it, nor on the other rows of x. There are two kinds of tiles:
//
// Few rows of x, where reading the weight is the cost: the lanes are outputs. Squares of the weight are transposed on
// their way into the registers, and multiplied with the words of x, broadcast.
// Many rows: the lanes are rows of x, packed before as [word, row], and the weight's words are broadcast where they
// lie. The weight is walked in strips of outputs, each in chunks of words, so that a chunk of the packed rows stays in
// the second-level cache and a tile's rows of the weight in the first.
//
// With an activation an output is made of two sums, its gate's and another, so that a strip has two parts: the gates of
// half as many outputs, then their others.
//
// Included inside `namespace baton::BATON_ISA_NAMESPACE { namespace {`, after simd.h and gate_impl.h.
#include "linear_tiles.h"
//
#include "linear_store.h"

#ifdef BATON_AMX_TILES
constexpr int MAX_FEW_ROWS = 0;
constexpr int STRIP_OUTPUTS = 2 * TILE_OUTPUTS;
#else
constexpr int MAX_FEW_ROWS = W == 16 ? 12 : W;
constexpr int STRIP_OUTPUTS = 6 * W;              // twice whole tiles of either kind
#endif
constexpr int MAX_CHUNK_WORDS = 512;              // of a row of the weight
constexpr int PACKED_CHUNK_BYTES = 384 * 1024;    // of rows of x, if they are many
constexpr int MIN_ITEM_WEIGHT_BYTES = 96 * 1024;  // with few rows: some microseconds of reading
constexpr int MIN_PIECE_OUTPUTS = 192;            // with many rows, so that packing them costs little beside
constexpr int MIN_BLOCK_ROWS = 64;                // enough sums for each word of the weight that is read
// For each thread, so that one that comes late holds up the others little.
constexpr int FEW_ROWS_ITEMS = 3;
constexpr int MANY_ROWS_ITEMS = 2;
static_assert(STRIP_OUTPUTS / 2 % TILE_OUTPUTS == 0 && STRIP_OUTPUTS / 2 % W == 0, "half a strip is whole tiles");

BATON_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
BATON_INLINE int64_t round_up(int64_t a, int64_t unit) { return ceil_div(a, unit) * unit; }
BATON_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
BATON_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// A product in the units of the tiles, cut into items: blocks of rows times pieces of outputs. There are more pieces
// the more threads there are, because each packs the rows it needs for itself.
template <class P>
struct LinearPlan {
  typedef typename P::element element;

  const BatonLinear& args;
  int num_rows;
  int num_parts;      // of a strip
  int strip_outputs;
  int num_words;    // of a row, filled up to whole granules with zeros
  int chunk_words;  // whole vectors; the last chunk may be shorter
  int block_rows;
  int64_t num_blocks;
  int piece_outputs;
  int64_t num_pieces;
  bool has_whole_granules;  // the weight's rows need no filling up
  size_t row_bytes;         // of the weight
  size_t copy_stride_bytes;
  // Offsets in an item's scratch memory.
  size_t few_x;     // [num_words, WORD_STEPS, MAX_FEW_ROWS]
  size_t packed_x;  // [panels, num_words, WORD_STEPS, TILE_VECTORS, W]
  size_t partial;   // [panels, STRIP_OUTPUTS, TILE_VECTORS, W]
  size_t copy;      // rows of the weight that cannot be used where they lie, copy_stride_bytes apart
  size_t scratch_size_bytes;

  LinearPlan(const BatonLinear& args, int num_threads) : args(args), num_rows(*args.num_rows) {
    num_parts = args.activation == BATON_NO_ACTIVATION ? 1 : 2;
    strip_outputs = STRIP_OUTPUTS / num_parts;
    const int granule_elements = GRANULE_WORDS * P::WORD_ELEMENTS;
    num_words = (int)round_up(args.num_inputs, granule_elements) / P::WORD_ELEMENTS;
    has_whole_granules = args.num_inputs % granule_elements == 0;
    chunk_words = (int)round_up(ceil_div(num_words, ceil_div(num_words, MAX_CHUNK_WORDS)), W);
    row_bytes = args.num_inputs * sizeof(element);
    copy_stride_bytes = chunk_words * P::WORD_STEPS * 4 + CACHE_LINE_BYTES;

    cut(num_threads);
    lay_out_scratch();
  }

  // Into some items for each thread where that is possible. A piece reads all rows of its block, and packs them, and a
  // block all of the weight, so neither are made so small that this would cost much beside the sums.
  void cut(int num_threads) {
    const bool is_few = num_rows <= MAX_FEW_ROWS;
    const int64_t fitting_panels = PACKED_CHUNK_BYTES / (chunk_words * P::WORD_STEPS * PANEL_ROWS * 4);
    const int64_t num_items = num_threads == 1 ? 1 : num_threads * (is_few ? FEW_ROWS_ITEMS : MANY_ROWS_ITEMS);
    const int64_t min_blocks = ceil_div(num_rows, most(fitting_panels, 1) * PANEL_ROWS);
    num_blocks = most(min_blocks, least(num_items, num_rows / MIN_BLOCK_ROWS));
    if (num_blocks > num_threads) num_blocks = round_up(num_blocks, num_threads);
    block_rows = is_few ? num_rows : (int)least(num_rows, round_up(ceil_div(num_rows, most(num_blocks, 1)), PANEL_ROWS));
    num_blocks = num_rows == 0 ? 0 : ceil_div(num_rows, block_rows);

    const int64_t num_weight_rows = (int64_t)args.num_outputs * num_parts;
    const int64_t max_pieces = is_few ? num_weight_rows * row_bytes / MIN_ITEM_WEIGHT_BYTES
                                      : num_weight_rows / MIN_PIECE_OUTPUTS;
    num_pieces = most(least(num_items / most(num_blocks, 1), max_pieces), 1);
    if (num_pieces > num_threads) num_pieces = num_pieces / num_threads * num_threads;
    piece_outputs = (int)round_up(ceil_div(args.num_outputs, num_pieces), is_few ? W : strip_outputs);
    num_pieces = ceil_div(args.num_outputs, piece_outputs);
  }

  void lay_out_scratch() {
    const int64_t num_panels = block_rows / PANEL_ROWS + 1;
    const int64_t num_steps = (int64_t)num_words * P::WORD_STEPS;
    size_t end = 0;
    auto take = [&](int64_t size_bytes) {
      const size_t begin = end;
      end += round_up(size_bytes, CACHE_LINE_BYTES);
      return begin;
    };
    few_x = take((num_steps * MAX_FEW_ROWS + W) * 4);
    packed_x = take(num_panels * num_steps * PANEL_ROWS * 4);
    partial = take(num_panels * STRIP_OUTPUTS * PANEL_ROWS * 4);
    copy = take((W > TILE_OUTPUTS ? W : TILE_OUTPUTS) * copy_stride_bytes);
    scratch_size_bytes = end;
  }

  // Of an output's row in the weight, and in the bias.
  int row_of(int part, int output) const { return part * args.num_outputs + output; }
  const char* weight(int weight_row, int word) const {
    return static_cast<const char*>(args.weight) + weight_row * row_bytes + word * 4;
  }
  const element* x(int row) const { return static_cast<const element*>(args.x) + row * args.x_stride; }
};

// An item at work: its plan, and its scratch memory.
template <class P>
struct LinearItem {
  const LinearPlan<P>& plan;
  char* scratch;

  uint32_t* few_x() const { return reinterpret_cast<uint32_t*>(scratch + plan.few_x); }
  uint32_t* packed_x(int row) const {
    return reinterpret_cast<uint32_t*>(scratch + plan.packed_x) + (size_t)row * plan.num_words * P::WORD_STEPS;
  }
  float* partial(int row) const {
    return reinterpret_cast<float*>(scratch + plan.partial) + (size_t)row * STRIP_OUTPUTS;
  }
};

// Words [begin, end) of `count` rows of the weight, from weight_row on, in scratch memory, and zeros up to `size` rows.
template <class P, bool IS_WIDENED>
static WordRows copy_weight(LinearItem<P> item, int weight_row, int count, int size, int begin, int end) {
  const LinearPlan<P>& plan = item.plan;
  char* const target = item.scratch + plan.copy;
  for (int i = 0; i < size; ++i) {
    uint32_t* const to = reinterpret_cast<uint32_t*>(target + i * plan.copy_stride_bytes);
    if (i >= count) {
      __builtin_memset(to, 0, plan.copy_stride_bytes);
      continue;
    }
    const auto* row = reinterpret_cast<const typename P::element*>(plan.weight(weight_row + i, begin));
    const int num_elements = plan.args.num_inputs - begin * P::WORD_ELEMENTS;
    if constexpr (IS_WIDENED) {
      widen_row(row, num_elements, end - begin, to);
    } else {
      copy_row<P>(row, num_elements, end - begin, to);
    }
  }
  return {target, plan.copy_stride_bytes};
}

// ---- few rows

// partial = sums of R rows with W rows of the weight from weight_row on, of which the first `count` exist.
template <class P, int R>
static void few_rows_sums(LinearItem<P> item, int weight_row, int count, float* partial) {
  const LinearPlan<P>& plan = item.plan;
  if (count == W && plan.has_whole_granules)
    return few_rows_tile<P, R>({plan.weight(weight_row, 0), plan.row_bytes}, item.few_x(), plan.num_words, true, true,
                               partial);
  for (int begin = 0; begin < plan.num_words; begin += plan.chunk_words) {
    const int end = (int)least(begin + plan.chunk_words, plan.num_words);
    const WordRows weight = copy_weight<P, false>(item, weight_row, count, W, begin, end);
    few_rows_tile<P, R>(weight, item.few_x() + begin * P::WORD_STEPS * R, end - begin, false, begin == 0, partial);
  }
}

// R rows, the first of which is `row`, with outputs begin .. end - 1.
template <class P, int R>
static void few_rows(LinearItem<P> item, int row, int begin, int end) {
  const LinearPlan<P>& plan = item.plan;
  const BatonLinear& args = plan.args;
  float* const partial = item.partial(0);
  for (int output = begin; output < end; output += W) {
    const int count = (int)least(end - output, W);
    for (int part = 0; part < plan.num_parts; ++part) {
      const int weight_row = plan.row_of(part, output);
      float* const sums = partial + part * R * W;
      few_rows_sums<P, R>(item, weight_row, count, sums);
      if (args.bias) {
        const vf bias = load_up_to(args.bias + weight_row, count);
        for (int r = 0; r < R; ++r) store(sums + r * W, load(sums + r * W) + bias);
      }
    }
    if (plan.num_parts == 2) gate(args.activation, partial, partial + R * W, R);
    for (int r = 0; r < R; ++r) {
      const int64_t at = (row + r) * args.out_stride + output;
      if (args.out_dtype == BATON_FLOAT32) {
        store_up_to(static_cast<float*>(args.out) + at, load(partial + r * W), count);
      } else {
        store_up_to(static_cast<bf16*>(args.out) + at, load(partial + r * W), count);
      }
    }
  }
}

template <class P, int R = MAX_FEW_ROWS>
static void few_rows(LinearItem<P> item, int row, int num_rows, int begin, int end) {
  if constexpr (R > 0) {
    if (num_rows == R) {
      few_rows<P, R>(item, row, begin, end);
    } else {
      few_rows<P, R - 1>(item, row, num_rows, begin, end);
    }
  }
}

// ---- many rows

// One chunk of words of one tile's rows of the weight, of which the first `count` exist, with all panels. `place` is
// where they stand in their strip.
template <class P>
static void many_rows_chunk(LinearItem<P> item, int num_rows, int weight_row, int count, int place, int begin, int end,
                            const Ahead& ahead) {
  const LinearPlan<P>& plan = item.plan;
  constexpr bool IS_WIDENED = P::WORD_STEPS == 2;
  const WordRows weight = !IS_WIDENED && count == TILE_OUTPUTS && plan.has_whole_granules
                              ? WordRows{plan.weight(weight_row, begin), plan.row_bytes}
                              : copy_weight<P, IS_WIDENED>(item, weight_row, count, TILE_OUTPUTS, begin, end);
  const int num_steps = (end - begin) * P::WORD_STEPS, first_step = begin * P::WORD_STEPS;
  const int share = (int)ceil_div(ahead.num_rows, ceil_div(num_rows, PANEL_ROWS));
  for (int row = 0, first = 0; row < num_rows; row += PANEL_ROWS, first += share) {
    const uint32_t* x = item.packed_x(row);
    float* partial = item.partial(row);
    const WordRows rows = {ahead.rows.data + first * ahead.rows.stride_bytes, ahead.rows.stride_bytes};
    const Ahead part = {rows, (int)least(ahead.num_rows - first, share)};
    if (num_rows - row > W) {
      x += first_step * PANEL_ROWS;
      partial += place * PANEL_ROWS;
      many_rows_tile<P, TILE_VECTORS>(weight, x, num_steps, part, begin == 0, partial);
    } else {
      x += first_step * W;
      partial += place * W;
      many_rows_tile<P, 1>(weight, x, num_steps, part, begin == 0, partial);
    }
  }
}

// From the sums of C vectors of rows with a strip's rows of the weight to those of its `count` outputs: adds the bias,
// and brings gates and others together.
template <class P, int C>
static void finish_panel(const LinearPlan<P>& plan, int output, int count, float* partial) {
  const BatonLinear& args = plan.args;
  if (args.bias) {
    for (int part = 0; part < plan.num_parts; ++part)
      for (int i = 0; i < count; ++i)
        for (int c = 0; c < C; ++c) {
          float* const sums = partial + ((size_t)(part * plan.strip_outputs + i) * C + c) * W;
          store(sums, load(sums) + args.bias[plan.row_of(part, output + i)]);
        }
  }
  if (plan.num_parts == 2) gate(args.activation, partial, partial + (size_t)plan.strip_outputs * C * W, count * C);
}

template <class P, int C>
static void store_strip_panel(LinearItem<P> item, int row, int num_rows, int output, int count, float* partial) {
  const BatonLinear& args = item.plan.args;
  finish_panel<P, C>(item.plan, output, count, partial);
  if (args.out_dtype == BATON_FLOAT32) {
    store_panel<float, C>(args, row, num_rows, output, count, partial);
  } else {
    store_panel<bf16, C>(args, row, num_rows, output, count, partial);
  }
}

template <class P>
static void store_strip(LinearItem<P> item, int row, int num_rows, int output, int count) {
  for (int at = 0; at < num_rows; at += PANEL_ROWS) {
    const int left = num_rows - at;
    if (left > W) {
      store_strip_panel<P, TILE_VECTORS>(item, row + at, left, output, count, item.partial(at));
    } else {
      store_strip_panel<P, 1>(item, row + at, left, output, count, item.partial(at));
    }
  }
}

// What is read after words [begin, end) of the tile of a part at `output`, in the strip from `strip` to `strip_end`.
template <class P>
static Ahead following(const LinearPlan<P>& plan, int strip, int strip_end, int part, int output, int begin, int end,
                       int piece_end) {
  output += TILE_OUTPUTS;
  if (output >= strip_end && part + 1 < plan.num_parts) {
    ++part;
    output = strip;
  } else if (output >= strip_end) {
    part = 0;
    begin = end < plan.num_words ? end : 0;
    output = begin ? strip : strip_end;
  }
  if (output >= piece_end) return {};
  return {{plan.weight(plan.row_of(part, output), begin), plan.row_bytes}, (int)least(piece_end - output, TILE_OUTPUTS)};
}

// Rows that are packed, the first of them `row`, with the outputs of one strip.
template <class P>
static void many_rows(LinearItem<P> item, int row, int num_rows, int strip, int strip_end, int piece_end) {
  const LinearPlan<P>& plan = item.plan;
  for (int begin = 0; begin < plan.num_words; begin += plan.chunk_words) {
    const int end = (int)least(begin + plan.chunk_words, plan.num_words);
    for (int part = 0; part < plan.num_parts; ++part) {
      for (int output = strip; output < strip_end; output += TILE_OUTPUTS) {
        const int count = (int)least(strip_end - output, TILE_OUTPUTS);
        const int place = part * plan.strip_outputs + output - strip;
        many_rows_chunk(item, num_rows, plan.row_of(part, output), count, place, begin, end,
                        following(plan, strip, strip_end, part, output, begin, end, piece_end));
      }
    }
  }
  store_strip(item, row, num_rows, strip, strip_end - strip);
}

// ---- items

template <class P>
static void compute_item(const LinearPlan<P>& plan, int64_t index, void* scratch) {
  const LinearItem<P> item = {plan, static_cast<char*>(scratch)};
  const BatonLinear& args = plan.args;
  const int row = (int)(index / plan.num_pieces) * plan.block_rows;
  const int num_rows = (int)least(plan.num_rows - row, plan.block_rows);
  const int begin = (int)(index % plan.num_pieces) * plan.piece_outputs;
  const int end = (int)least(begin + plan.piece_outputs, args.num_outputs);
  const int rest = num_rows % PANEL_ROWS;
  const int num_few = rest <= MAX_FEW_ROWS ? rest : 0;
  const int num_many = num_rows - num_few;
  if (num_few > 0)
    interleave_rows<P>(plan.x(row + num_many), args.x_stride, num_few, args.num_inputs, plan.num_words, item.few_x());
  if (num_many == 0) return few_rows<P>(item, row, num_few, begin, end);
  for (int at = 0; at < num_many; at += PANEL_ROWS) {
    const int count = (int)least(num_many - at, PANEL_ROWS);
    pack_panel<P>(plan.x(row + at), args.x_stride, count, args.num_inputs, plan.num_words, (int)ceil_div(count, W),
                  item.packed_x(at));
  }
  for (int strip = begin; strip < end; strip += plan.strip_outputs) {
    const int strip_end = (int)least(strip + plan.strip_outputs, end);
    many_rows(item, row, num_many, strip, strip_end, end);
    if (num_few) few_rows<P>(item, row + num_many, num_few, strip, strip_end);
  }
}

template <class P>
static int64_t num_items_of(const LinearPlan<P>& plan) {
  return plan.num_blocks * plan.num_pieces;
}

#ifndef BATON_AMX_TILES

static int64_t linear_num_items(const BatonLinear& args, int num_threads) {
  if (args.dtype == BATON_FLOAT32) return num_items_of(LinearPlan<FloatProducts>(args, num_threads));
  return num_items_of(LinearPlan<Bf16Products>(args, num_threads));
}

static size_t linear_scratch_size_bytes(const BatonLinear& args, int num_threads) {
  if (args.dtype == BATON_FLOAT32) return LinearPlan<FloatProducts>(args, num_threads).scratch_size_bytes;
  return LinearPlan<Bf16Products>(args, num_threads).scratch_size_bytes;
}

static void linear_item(const BatonLinear& args, int num_threads, int64_t item, void* scratch) {
  if (args.dtype == BATON_FLOAT32) {
    compute_item(LinearPlan<FloatProducts>(args, num_threads), item, scratch);
  } else {
    compute_item(LinearPlan<Bf16Products>(args, num_threads), item, scratch);
  }
}

#endif
