// Experts of a layer on host cores: routing, threads and order. The Python side, with the contract,
// is oled_jax/offload/cpu_experts/native.py; the arithmetic is in ffn_kernel.h.

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "ffn_kernel.h"
#include "thread_pool.h"

namespace nanobind {
class module_;
}

namespace oled_jax {

// All layers are alike; their pages stay where they are for as long as the engine lives.
struct ExpertPages {
  struct Layer {
    const std::byte* gate_up;  // [experts, 2F, D]
    const std::byte* down;     // [experts, D, F]
  };
  WeightFormat format;
  int64_t experts, D, F;
  std::vector<Layer> layers;
};

// One layer's share. `hidden` and `output` are used until it is collected or dropped, the other
// arrays only during the call. A token names an expert at most once; so do `experts`.
struct ExpertShare {
  int64_t layer;
  int64_t tokens, top_k, count;
  const std::byte* hidden;    // [tokens, D], in the weights' format
  const int64_t* experts;     // [count]: those computed here
  const int32_t* expert_ids;  // [tokens, top_k]; others are ignored
  int64_t ids_step;           // from one token to the next
  const float* gates;         // [tokens, top_k]
  int64_t gates_step;
  const bool* token_mask;     // [tokens]
  float* output;              // [tokens, D]
};

struct ShareOutcome {
  int64_t not_finite;  // position in `experts` of the first whose result is not finite, or -1
  int64_t pages;       // experts with at least one token
  double busy_us, span_us, wait_us;
};

class ExpertJob;

// Memory in whole cache lines.
struct alignas(64) CacheLine {
  std::byte bytes[64];
};
using Scratch = std::vector<CacheLine>;

// Thread-safe, except that calls for one layer may not overlap. `submit` and `collect` throw
// std::runtime_error after `close`, and everything but `close` does in a process forked from the
// one that made the object: its threads do not exist there.
class CpuExperts {
 public:
  // Throws std::invalid_argument if `isa` is no level of this machine.
  CpuExperts(ExpertPages pages, int threads, const std::string& isa, const std::vector<int>& cpus);
  ~CpuExperts();
  CpuExperts(const CpuExperts&) = delete;
  CpuExperts& operator=(const CpuExperts&) = delete;

  // Starts a share and returns. What the layer had uncollected is dropped: after the chunks in
  // progress no thread touches its arrays. Throws std::out_of_range for a layer or expert without
  // pages, and nothing has changed then.
  void submit(const ExpertShare& share);
  // Waits for a layer's share; its output is complete. Rethrows the error of the computation.
  ShareOutcome collect(int64_t layer);
  // Drops everything that was not collected, as submit does.
  void reset();
  // Drops everything and ends the threads. May be called twice, and does nothing in a forked child.
  void close();

 private:
  void require_open() const;  // with mutex_ held
  void require_owner() const;
  void drop(const std::shared_ptr<ExpertJob>& job);
  void recycle(ExpertJob& job);

  const ExpertPages pages_;
  const FfnKernel& kernel_;
  const int threads_;
  const pid_t owner_;
  std::unique_ptr<ThreadPool> pool_;

  std::mutex mutex_;
  bool closed_ = false;
  std::unordered_map<int64_t, std::shared_ptr<ExpertJob>> jobs_;  // by layer, not yet collected
  std::vector<Scratch> spare_;  // of former jobs: fresh memory costs page faults
};

// Adds the class CpuExperts and the functions cpu_isa_levels and host_read_gbs to the module.
void bind_cpu_experts(nanobind::module_& module);

}  // namespace oled_jax
