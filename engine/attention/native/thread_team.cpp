#include "thread_team.h"

#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sched.h>
#endif

namespace baton {
namespace {

// The word: 20 bits serial number of the piece, 22 bits number of items, 22 bits next item. The number of items is 0
// between jobs. A thread adds at most one to the next item beyond the last, so there is no overflow into its neighbour.
constexpr int ITEM_BITS = 22;
constexpr uint64_t ITEM_MASK = (1ull << ITEM_BITS) - 1;
constexpr uint64_t SERIAL_STEP = 1ull << (2 * ITEM_BITS);

constexpr int SPINS_BEFORE_YIELD = 2000;    // some 20 to 80 microseconds, longer than most pieces
constexpr int SPINS_BEFORE_SLEEP = 2000;    // between jobs

int64_t num_items(uint64_t state) { return (int64_t)(state >> ITEM_BITS & ITEM_MASK); }
int64_t next_item(uint64_t state) { return (int64_t)(state & ITEM_MASK); }

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void yield() {
#ifdef __linux__
  sched_yield();
#else
  std::this_thread::yield();
#endif
}

struct Scratch {
  void* data = nullptr;
  size_t size_bytes = 0;
  ~Scratch() { std::free(data); }
};

}  // namespace

ThreadTeam::ThreadTeam(int num_threads) {
  for (int i = 1; i < num_threads; ++i) helpers_.emplace_back([this] { serve(); });
}

ThreadTeam::~ThreadTeam() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_ending_ = true;
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void ThreadTeam::run(Job& job) {
  if (helpers_.empty()) {
    while (const int64_t count = job.advance())
      for (int64_t item = 0; item < count; ++item) job.do_item(item);
    return;
  }
  job_ = &job;
  if (!publish_next_piece()) return;
  wake_helpers();
  work_until_idle();
}

// False if the job is done.
bool ThreadTeam::publish_next_piece() {
  const int64_t count = job_->advance();
  num_done_.store(0, std::memory_order_relaxed);
  const uint64_t serial = (state_.load(std::memory_order_relaxed) & ~(SERIAL_STEP - 1)) + SERIAL_STEP;
  state_.store(serial | (uint64_t)count << ITEM_BITS);
  return count > 0;
}

void ThreadTeam::wake_helpers() {
  // Both this and the helper's going to sleep first write, then read the other's word, in one order for all.
  if (num_sleeping_.load() == 0) return;
  { std::lock_guard<std::mutex> lock(mutex_); }
  wake_.notify_all();
}

void ThreadTeam::work_until_idle() {
  int num_spins = 0;
  for (;;) {
    uint64_t state = state_.load(std::memory_order_acquire);
    if (num_items(state) == 0) return;
    if (next_item(state) >= num_items(state)) {
      if (++num_spins < SPINS_BEFORE_YIELD) {
        relax();
      } else {
        yield();
      }
      continue;
    }
    num_spins = 0;
    int64_t num_mine = 0;
    for (;;) {
      state = state_.fetch_add(1, std::memory_order_acq_rel);
      if (next_item(state) >= num_items(state)) break;
      job_->do_item(next_item(state));
      ++num_mine;
    }
    // Until these are counted the piece cannot end, so `state` still told of it.
    if (num_mine > 0 && num_done_.fetch_add(num_mine, std::memory_order_acq_rel) + num_mine == num_items(state))
      publish_next_piece();
  }
}

void ThreadTeam::serve() {
  for (;;) {
    for (int spin = 0; spin < SPINS_BEFORE_SLEEP && num_items(state_.load(std::memory_order_acquire)) == 0; ++spin)
      relax();
    if (num_items(state_.load(std::memory_order_acquire)) == 0) {
      std::unique_lock<std::mutex> lock(mutex_);
      num_sleeping_.fetch_add(1);
      wake_.wait(lock, [this] { return is_ending_ || num_items(state_.load()) > 0; });
      num_sleeping_.fetch_sub(1);
      if (is_ending_) return;
    }
    work_until_idle();
  }
}

void* thread_scratch(size_t size_bytes) {
  static thread_local Scratch scratch;
  if (scratch.size_bytes < size_bytes) {
    std::free(scratch.data);
    const size_t rounded = (size_bytes + 63) / 64 * 64;
    scratch.data = std::aligned_alloc(64, rounded);
    if (!scratch.data) throw std::bad_alloc();
    scratch.size_bytes = rounded;
  }
  return scratch.data;
}

}  // namespace baton
