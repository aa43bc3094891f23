// Threads that compute chunks of tasks. They sleep when there is nothing to do.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace oled_jax {

// Work in chunks. Threads claim chunks in order, so that a thread that comes late takes fewer.
class Task {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Task(int64_t chunks) : chunks_(chunks) {}
  virtual ~Task() = default;
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  // Chunks that have not begun are skipped.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }

 protected:
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

 private:
  friend class ThreadPool;

  // Called by several threads at once. An exception cancels the task.
  virtual void run(int64_t chunk) = 0;
  // Called once for every chunk, in the same thread, also when it was skipped or has failed.
  virtual void finished(int64_t chunk) noexcept = 0;

  const int64_t chunks_;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> cancelled_{false};
  const Clock::time_point created_ = Clock::now();
  // Guarded by the pool's mutex.
  int threads_inside_ = 0;
  bool begun_ = false;
  bool done_ = false;
  std::exception_ptr error_;
  Clock::duration busy_{0};  // summed over threads
  Clock::time_point ended_;
};

struct TaskOutcome {
  std::exception_ptr error;  // the first one
  double busy_us;            // inside threads, summed over them
  double span_us;            // from the task's creation to its end
};

class ThreadPool {
 public:
  // If `cpus` names any, thread i runs on cpus[i % size] only.
  ThreadPool(int threads, const std::vector<int>& cpus);
  // Ends as `stop` does.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Returns at once. Tasks are begun in order.
  void submit(std::shared_ptr<Task> task);
  // Sleeps until a submitted task is over; by then no thread is inside it.
  TaskOutcome wait(const Task& task);
  // Finishes what was submitted and ends the threads. Nothing may be submitted afterwards.
  void stop();

 private:
  void work();
  void claim_chunks(Task& task);

  std::mutex mutex_;
  std::condition_variable submitted_, done_;
  std::deque<std::shared_ptr<Task>> queue_;  // tasks that may have chunks left to claim
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

// Counters that reach zero when a part of a task is complete, for chunks that need that part.
class Countdowns {
 public:
  explicit Countdowns(size_t size) : left_(size) {}
  // Before the task is submitted.
  void set(size_t index, int64_t count) { left_[index].store(count, std::memory_order_relaxed); }
  void count(size_t index) noexcept;
  // Spins for some microseconds, then sleeps.
  void wait(size_t index);

 private:
  bool reached(size_t index) const { return left_[index].load(std::memory_order_acquire) == 0; }

  std::vector<std::atomic<int64_t>> left_;
  std::mutex mutex_;
  std::condition_variable zero_;
};

}  // namespace oled_jax
