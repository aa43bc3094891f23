#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

namespace oled_jax {
namespace {

constexpr auto kSpin = std::chrono::microseconds(5);

double microseconds(Task::Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A thread that the interpreter does not know: signals are for the threads that it does.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

void pin(std::thread& thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  const int error = pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
  if (error) {
    throw std::system_error(error, std::generic_category(),
                            "cannot pin a thread to CPU " + std::to_string(cpu));
  }
}

}  // namespace

ThreadPool::ThreadPool(int threads, const std::vector<int>& cpus) {
  try {
    const SignalsBlocked blocked;  // new threads inherit it
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back([this] { work(); });
      pthread_setname_np(threads_.back().native_handle(),
                         ("cpu-experts-" + std::to_string(i)).c_str());
      if (!cpus.empty()) pin(threads_.back(), cpus[i % cpus.size()]);
    }
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::submit(std::shared_ptr<Task> task) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(task));
  }
  // Waking a thread takes microseconds, and who submits has more to do: the first thread wakes the
  // others.
  submitted_.notify_one();
}

TaskOutcome ThreadPool::wait(const Task& task) {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return task.done_; });
  return {task.error_, microseconds(task.busy_), microseconds(task.ended_ - task.created_)};
}

void ThreadPool::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  submitted_.notify_all();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void ThreadPool::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    submitted_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::shared_ptr<Task> task = queue_.front();
    const bool first = !std::exchange(task->begun_, true);
    ++task->threads_inside_;
    lock.unlock();
    const auto entered = Task::Clock::now();
    if (first) submitted_.notify_all();
    claim_chunks(*task);
    const auto left = Task::Clock::now();
    lock.lock();
    // The first to leave closes the door: all chunks are claimed, and who is inside computes them.
    if (!queue_.empty() && queue_.front() == task) queue_.pop_front();
    task->busy_ += left - entered;
    if (--task->threads_inside_ == 0) {
      task->ended_ = left;
      task->done_ = true;
      done_.notify_all();
    }
  }
}

void ThreadPool::claim_chunks(Task& task) {
  while (true) {
    const int64_t chunk = task.next_.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= task.chunks_) return;
    try {
      if (!task.cancelled()) task.run(chunk);
    } catch (...) {
      std::lock_guard lock(mutex_);
      if (!task.error_) task.error_ = std::current_exception();
      task.cancel();
    }
    task.finished(chunk);
  }
}

void Countdowns::count(size_t index) noexcept {
  if (left_[index].fetch_sub(1, std::memory_order_acq_rel) == 1) {
    // Who saw the old value under the mutex sleeps by now; who did not will see the new one.
    std::unique_lock(mutex_).unlock();
    zero_.notify_all();
  }
}

void Countdowns::wait(size_t index) {
  if (reached(index)) return;
  const auto limit = Task::Clock::now() + kSpin;
  while (Task::Clock::now() < limit) {
    pause_briefly();
    if (reached(index)) return;
  }
  std::unique_lock lock(mutex_);
  zero_.wait(lock, [&] { return reached(index); });
}

}  // namespace oled_jax
