#include "thread_pool.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace baton {
namespace {

class ThreadPool {
 public:
  // Never destroyed: its threads wait in it until the process ends.
  static ThreadPool& instance() {
    static ThreadPool* pool = new ThreadPool;
    return *pool;
  }

  void run(int64_t num_items, int num_threads, ItemFunction function, void* context) {
    std::lock_guard<std::mutex> one_call(call_mutex_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while ((int)threads_.size() < num_threads - 1) start_thread();
      function_ = function;
      context_ = context;
      num_items_ = num_items;
      next_item_.store(0, std::memory_order_relaxed);
      // Threads beyond those asked for sit this call out.
      num_helpers_ = num_threads - 1;
      num_busy_ = num_helpers_;
      ++call_;
    }
    wake_.notify_all();
    take_items(num_items, function, context);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return num_busy_ == 0; });
  }

 private:
  void start_thread() {
    const int index = (int)threads_.size();
    threads_.emplace_back([this, index, seen = call_] { serve(index, seen); });
    threads_.back().detach();
  }

  void serve(int index, uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return call_ != seen; });
      seen = call_;
      if (index >= num_helpers_) continue;
      const int64_t num_items = num_items_;
      const ItemFunction function = function_;
      void* const context = context_;
      lock.unlock();
      take_items(num_items, function, context);
      lock.lock();
      if (--num_busy_ == 0) done_.notify_one();
    }
  }

  void take_items(int64_t num_items, ItemFunction function, void* context) {
    for (;;) {
      const int64_t item = next_item_.fetch_add(1, std::memory_order_relaxed);
      if (item >= num_items) return;
      function(context, item);
    }
  }

  std::mutex call_mutex_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::vector<std::thread> threads_;
  uint64_t call_ = 0;
  int num_helpers_ = 0;
  int num_busy_ = 0;
  int64_t num_items_ = 0;
  ItemFunction function_ = nullptr;
  void* context_ = nullptr;
  std::atomic<int64_t> next_item_{0};
};

struct Scratch {
  void* data = nullptr;
  size_t size_bytes = 0;
  ~Scratch() { std::free(data); }
};

}  // namespace

void parallel_for(int64_t num_items, int num_threads, ItemFunction function, void* context) {
  if (num_threads > num_items) num_threads = (int)num_items;
  if (num_threads <= 1) {
    for (int64_t item = 0; item < num_items; ++item) function(context, item);
    return;
  }
  ThreadPool::instance().run(num_items, num_threads, function, context);
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
