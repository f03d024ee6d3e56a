#include "program.h"

#include <algorithm>
#include <cstring>

namespace baton {
namespace {

// Elements of an elementwise operation that are worth an item: a few microseconds, against some 0.2 for handing it over.
constexpr int64_t WORK_PER_ITEM = 16384;

template <class Args>
const Args& args_of(const BatonOp& op) {
  return *static_cast<const Args*>(op.args);
}

void select_rows(const BatonSelectRows& args, const BatonStep& step, int32_t begin, int32_t end) {
  const char* source = static_cast<const char*>(args.source);
  char* target = static_cast<char*>(args.target);
  for (int32_t row = begin; row < end; ++row)
    std::memcpy(target + row * args.target_stride_bytes, source + step.rows[row] * args.source_stride_bytes,
                args.row_size_bytes);
}

void place_rows(const BatonSelectRows& args, const BatonStep& step, int32_t begin, int32_t end) {
  const char* source = static_cast<const char*>(args.source);
  char* target = static_cast<char*>(args.target);
  for (int32_t row = begin; row < end; ++row)
    std::memcpy(target + step.rows[row] * args.target_stride_bytes, source + row * args.source_stride_bytes,
                args.row_size_bytes);
}

// The tokens of a sequence whose outputs are wanted, from the first to the last one.
struct TokenSpan {
  int32_t begin;
  int32_t end;
};

// `row` is the first of `rows` that belongs to the sequence or to a later one, and becomes that of the next sequence.
TokenSpan selected_tokens(const BatonStep& step, int32_t sequence, int32_t* row) {
  const int32_t first = step.query_starts[sequence], end = step.query_starts[sequence + 1];
  const int32_t begin_row = *row;
  while (*row < step.num_selected && step.rows[*row] < end) ++*row;
  if (*row == begin_row) return {0, 0};
  return {(int32_t)step.rows[begin_row] - first, (int32_t)step.rows[*row - 1] - first + 1};
}

}  // namespace

int64_t Program::advance() {
  if (is_started_) ++op_;
  is_started_ = true;
  for (; op_ != end_; ++op_) {
    const int64_t count = prepare();
    if (count > 1) return count;
    if (count == 1) do_item(0);
  }
  return 0;
}

// The number of items of the operation at hand.
int64_t Program::prepare() {
  switch (op_->kind) {
    case BATON_EMBED: return split_rows(step_.num_tokens, args_of<BatonEmbed>(*op_).size);
    case BATON_SELECT_ROWS:
    case BATON_PLACE_ROWS: {
      const BatonSelectRows& args = args_of<BatonSelectRows>(*op_);
      return split_rows(step_.num_selected, args.row_size_bytes / 4);
    }
    case BATON_ADD_NORM: {
      const BatonAddNorm& args = args_of<BatonAddNorm>(*op_);
      return split_rows(*args.num_rows, 2 * (int64_t)args.size);
    }
    case BATON_LINEAR: return table_.linear_num_items(args_of<BatonLinear>(*op_), num_threads_);
    case BATON_ROTARY_WRITE: {
      const BatonRotaryWrite& args = args_of<BatonRotaryWrite>(*op_);
      return split_rows(step_.num_tokens, (int64_t)(args.num_heads + 2 * args.kv.num_kv_heads) * args.kv.head_dim);
    }
    case BATON_ATTENTION:
      plan_attention(args_of<BatonAttention>(*op_));
      return (int64_t)tiles_.size();
    case BATON_ARGMAX: {
      const BatonArgmax& args = args_of<BatonArgmax>(*op_);
      return split_rows(*args.num_rows, args.size);
    }
  }
  return 0;
}

int64_t Program::split_rows(int32_t num_rows, int64_t work_per_row) {
  num_rows_ = num_rows;
  num_rows_per_item_ = (int32_t)std::clamp<int64_t>(WORK_PER_ITEM / std::max<int64_t>(work_per_row, 1), 1, 64);
  return (num_rows + num_rows_per_item_ - 1) / num_rows_per_item_;
}

void Program::plan_attention(const BatonAttention& args) {
  tiles_.clear();
  const int32_t tile_tokens = table_.attention_tile_tokens(args);
  int32_t row = 0;
  for (int32_t sequence = 0; sequence < step_.num_sequences; ++sequence) {
    TokenSpan tokens = {0, step_.query_starts[sequence + 1] - step_.query_starts[sequence]};
    if (args.selected_only) tokens = selected_tokens(step_, sequence, &row);
    for (int32_t kv_head = 0; kv_head < args.kv.num_kv_heads; ++kv_head)
      for (int32_t begin = tokens.begin; begin < tokens.end; begin += tile_tokens)
        tiles_.push_back({sequence, kv_head, begin, std::min(begin + tile_tokens, tokens.end)});
  }
  if (num_threads_ == 1) return;
  // Long tiles first: a thread that took one last would keep the others waiting.
  auto cost = [&](const AttentionTile& tile) {
    const int64_t num_keys = step_.context_starts[tile.sequence] + tile.end;
    return (args.window > 0 ? std::min<int64_t>(num_keys, args.window) : num_keys) * (tile.end - tile.begin);
  };
  std::stable_sort(tiles_.begin(), tiles_.end(),
                   [&](const AttentionTile& a, const AttentionTile& b) { return cost(a) > cost(b); });
}

void Program::do_item(int64_t item) {
  const int32_t begin = (int32_t)item * num_rows_per_item_;
  const int32_t end = std::min(begin + num_rows_per_item_, num_rows_);
  switch (op_->kind) {
    case BATON_EMBED: return table_.embed(args_of<BatonEmbed>(*op_), step_, begin, end);
    case BATON_SELECT_ROWS: return select_rows(args_of<BatonSelectRows>(*op_), step_, begin, end);
    case BATON_PLACE_ROWS: return place_rows(args_of<BatonSelectRows>(*op_), step_, begin, end);
    case BATON_ADD_NORM: return table_.add_norm(args_of<BatonAddNorm>(*op_), begin, end);
    case BATON_LINEAR: {
      const BatonLinear& args = args_of<BatonLinear>(*op_);
      void* const scratch = thread_scratch(table_.linear_scratch_size_bytes(args, num_threads_));
      return table_.linear_item(args, num_threads_, item, scratch);
    }
    case BATON_ROTARY_WRITE: return table_.rotary_write(args_of<BatonRotaryWrite>(*op_), step_, begin, end);
    case BATON_ATTENTION: {
      const BatonAttention& args = args_of<BatonAttention>(*op_);
      // Threads take tiles in turn, more or less.
      const int64_t after = item + num_threads_;
      const AttentionTile* next = after < (int64_t)tiles_.size() ? &tiles_[after] : nullptr;
      return table_.attention_tile(args, step_, tiles_[item], next,
                                   thread_scratch(table_.attention_scratch_size_bytes(args)));
    }
    case BATON_ARGMAX: return table_.argmax(args_of<BatonArgmax>(*op_), begin, end);
  }
}

}  // namespace baton
