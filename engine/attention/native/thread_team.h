// A few threads that work through a job together.
#ifndef BATON_THREAD_TEAM_H
#define BATON_THREAD_TEAM_H

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace baton {

// A sequence of pieces, one after the other. A piece is a number of items that may be done in any order and at once.
class Job {
 public:
  // Goes on to the next piece that is worth more than one thread, doing itself what lies before it; returns the number
  // of its items, or 0 if the job is done. Called on one thread, when all items of the last piece are done.
  virtual int64_t advance() = 0;
  // Does one item of the present piece; called on several threads at once.
  virtual void do_item(int64_t item) = 0;

 protected:
  ~Job() = default;
};

// The caller's thread and its helpers. No thread is waited for that has no item in hand: whoever finishes a piece's
// last item advances the job, so a helper that the machine does not run at the moment holds up nothing.
//
// All is decided by one word: the piece's serial number, its number of items and the next item to hand out. Taking an
// item is one addition to it, which can only ever give an item of the present piece.
class ThreadTeam {
 public:
  explicit ThreadTeam(int num_threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int num_threads() const { return (int)helpers_.size() + 1; }

  // Returns when the job is done. One job at a time.
  void run(Job& job);

 private:
  void serve();
  void work_until_idle();
  bool publish_next_piece();
  void wake_helpers();

  std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> num_done_{0};  // items of the present piece
  alignas(64) std::atomic<int> num_sleeping_{0};
  Job* job_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool is_ending_ = false;
  std::vector<std::thread> helpers_;
};

// Memory of the calling thread, 64-byte aligned, at least so large; valid until the thread's next call.
void* thread_scratch(size_t size_bytes);

}  // namespace baton

#endif
