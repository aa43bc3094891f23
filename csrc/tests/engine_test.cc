// The thread pool and the order of calls, hammered from several threads. Built with the thread
// sanitizer.

#include <atomic>
#include <limits>
#include <stdexcept>
#include <thread>

#include "expert_case.h"

namespace oled_jax {
namespace {

constexpr int kLayers = 4;

// A task that fails in one chunk, and counts.
class Failing final : public Task {
 public:
  explicit Failing(int64_t chunks) : Task(chunks) {}
  std::atomic<int64_t> ran{0}, over{0};

 private:
  void run(int64_t chunk) override {
    ++ran;
    if (chunk == 3) throw std::domain_error("chunk 3");
  }
  void finished(int64_t) noexcept override { ++over; }
};

void errors_surface() {
  ThreadPool pool(3, {});
  for (int i = 0; i < 200; ++i) {
    const auto task = std::make_shared<Failing>(50);
    pool.submit(task);
    const TaskOutcome outcome = pool.wait(*task);
    require(task->over == 50 && task->ran <= 50, "every chunk is finished once");
    try {
      require(outcome.error != nullptr, "the error is kept");
      std::rethrow_exception(outcome.error);
    } catch (const std::domain_error&) {
    }
  }
}

// As in an engine: one thread submits layer after layer, another collects them.
void two_callers(CpuExperts& engine, const ExpertCase& one, int passes) {
  std::vector<std::vector<float>> outputs(kLayers, std::vector<float>(one.tokens * one.D));
  std::atomic<int> submitted{0}, collected{0};
  std::thread collector([&] {
    for (int i = 0; i < passes * kLayers; ++i) {
      while (submitted <= i) std::this_thread::yield();
      require(engine.collect(i % kLayers).pages > 0, "pages are counted");
      if (i % 16 == 0) one.check(outputs[i % kLayers].data(), "two callers");
      ++collected;
    }
  });
  for (int i = 0; i < passes * kLayers; ++i) {
    while (collected <= i - kLayers) std::this_thread::yield();
    engine.submit(one.share(i % kLayers, one.hidden.stored.data(), outputs[i % kLayers].data()));
    ++submitted;
  }
  collector.join();
}

// Work that is never collected: submitted again, reset, closed, destroyed.
void dropped(const ExpertCase& one, int passes) {
  for (int i = 0; i < passes; ++i) {
    std::vector<float> outputs[2];
    for (auto& output : outputs) output.resize(one.tokens * one.D);
    CpuExperts engine(one.pages(one.gate_up.stored.data(), one.down.stored.data(), kLayers), 3,
                      "portable", {});
    for (int k = 0; k < 6; ++k) {
      engine.submit(one.share(k % 2, one.hidden.stored.data(), outputs[k % 2].data()));
      if (k % 3 == 1) engine.reset();
    }
    engine.reset();
    for (auto& output : outputs) std::fill(output.begin(), output.end(), 0.0f);  // nobody else may
    engine.submit(one.share(0, one.hidden.stored.data(), outputs[0].data()));
    if (i % 2) engine.close();
  }
}

void closed_while_collecting(const ExpertCase& one, int passes) {
  for (int i = 0; i < passes; ++i) {
    std::vector<float> output(one.tokens * one.D);
    CpuExperts engine(one.pages(one.gate_up.stored.data(), one.down.stored.data(), kLayers), 2,
                      "portable", {});
    engine.submit(one.share(1, one.hidden.stored.data(), output.data()));
    std::thread closer([&] { engine.close(); });
    try {
      engine.collect(1);
    } catch (const std::runtime_error&) {  // it was closed, or reset by closing, before
    }
    closer.join();
  }
}

void the_first_that_is_not_finite(ExpertCase one) {
  for (const int64_t expert : {1, 2}) {
    const float infinity = std::numeric_limits<float>::infinity();
    std::memcpy(&one.down.stored[expert * one.D * one.F * sizeof(float)], &infinity, sizeof(float));
  }
  std::fill(one.mask.begin(), one.mask.end(), 1);
  std::vector<float> output(one.tokens * one.D);
  CpuExperts engine(one.pages(one.gate_up.stored.data(), one.down.stored.data(), 1), 3, "portable",
                    {});
  for (int i = 0; i < 20; ++i) {
    engine.submit(one.share(0, one.hidden.stored.data(), output.data()));
    const int64_t position = engine.collect(0).not_finite;
    require(position >= 0 && one.chosen[position] == 2, "expert 2 comes first");
  }
}

}  // namespace
}  // namespace oled_jax

int main() {
  using namespace oled_jax;
  errors_surface();
  const ExpertCase small(WeightFormat::kFloat32, 4, 48, 20, 9);
  const ExpertCase large(WeightFormat::kFloat32, 3, 1100, 60, 5);  // several chunks of each kind
  for (const ExpertCase* one : {&small, &large}) {
    const int passes = one == &small ? 50 : 5;
    const auto pages = one->pages(one->gate_up.stored.data(), one->down.stored.data(), kLayers);
    CpuExperts engine(pages, 3, "portable", {}), other(pages, 2, "portable", {0});
    std::thread thread([&] { two_callers(other, *one, passes); });
    two_callers(engine, *one, passes);
    thread.join();
    dropped(*one, passes);
    closed_while_collecting(*one, passes);
  }
  the_first_that_is_not_finite(small);
  std::puts("passed");
}
