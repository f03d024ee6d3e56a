// A program as a job of the thread team.
#ifndef BATON_PROGRAM_H
#define BATON_PROGRAM_H

#include <vector>

#include "kernel_table.h"
#include "thread_team.h"

namespace baton {

// Operations [begin, end) of one step. An operation that is too small to be worth a second thread is done by the one
// that advances; every other is a piece.
class Program final : public Job {
 public:
  Program(const KernelTable& table, const BatonOp* ops, int32_t begin, int32_t end, const BatonStep& step,
          int num_threads)
      : table_(table), op_(ops + begin), end_(ops + end), step_(step), num_threads_(num_threads) {}

  int64_t advance() override;
  void do_item(int64_t item) override;

 private:
  int64_t prepare();
  int64_t split_rows(int32_t num_rows, int64_t work_per_row);
  void plan_attention(const BatonAttention& args);

  const KernelTable& table_;
  const BatonOp* op_;  // the present piece, once started
  const BatonOp* const end_;
  const BatonStep& step_;
  const int num_threads_;
  bool is_started_ = false;
  int32_t num_rows_ = 0;           // of the present operation, if it is split by rows
  int32_t num_rows_per_item_ = 0;
  std::vector<AttentionTile> tiles_;  // of the present operation, if it is attention
};

}  // namespace baton

#endif
