#include "cpu_experts.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>

namespace oled_jax {
namespace {

// What a thread claims at a time: long enough to stream, short enough that none idles at the end.
constexpr int64_t kGateUpBytes = 192 * 1024;
constexpr int64_t kDownBytes = 96 * 1024;  // of each expert
// Rows of a chunk come in multiples of these. A tile has 3 or 4 rows of gate or up; results of 16
// rows of down fill a cache line, which then has one writer.
constexpr int64_t kGateUpStep = 24;
constexpr int64_t kDownStep = 16;
constexpr int64_t kPackTokens = 4;
constexpr int64_t kAllFinite = std::numeric_limits<int64_t>::max();

int64_t pieces(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }

int64_t round_up(int64_t size, int64_t step) { return pieces(size, step) * step; }

// Which tokens go to which of the experts computed here. A pair is a token and one of its experts.
struct Routes {
  struct Expert {
    int64_t position;  // in ExpertShare::experts
    int64_t id;
    int64_t first_pair, tokens;  // its pairs, tokens ascending
  };
  std::vector<Expert> experts;  // those with a token, in the share's order
  std::vector<int64_t> tokens;  // those that occur, ascending
  // By pair.
  std::vector<int64_t> input;  // index into `tokens`
  std::vector<float> gate;
};

Routes route(const ExpertShare& share, int64_t num_experts) {
  std::vector<int64_t> position(num_experts, -1);
  for (int64_t i = 0; i < share.count; ++i) {
    const int64_t id = share.experts[i];
    if (id < 0 || id >= num_experts) {
      throw std::out_of_range("CPU experts (native): expert " + std::to_string(id) +
                              " is not one of " + std::to_string(num_experts));
    }
    position[id] = i;
  }
  const auto for_each_pair = [&](const auto& body) {
    for (int64_t t = 0; t < share.tokens; ++t) {
      if (!share.token_mask[t]) continue;
      const int32_t* const ids = share.expert_ids + t * share.ids_step;
      const float* const gates = share.gates + t * share.gates_step;
      for (int64_t k = 0; k < share.top_k; ++k) {
        const int32_t id = ids[k];
        if (id >= 0 && id < num_experts && position[id] >= 0) body(t, position[id], gates[k]);
      }
    }
  };
  std::vector<int64_t> loads(share.count, 0);
  for_each_pair([&](int64_t, int64_t expert, float) { ++loads[expert]; });

  Routes routes;
  std::vector<int64_t> next_pair(share.count);
  int64_t pairs = 0;
  for (int64_t i = 0; i < share.count; ++i) {
    next_pair[i] = pairs;
    if (loads[i]) routes.experts.push_back({i, share.experts[i], pairs, loads[i]});
    pairs += loads[i];
  }
  routes.input.resize(pairs);
  routes.gate.resize(pairs);
  for_each_pair([&](int64_t token, int64_t expert, float gate) {
    if (routes.tokens.empty() || routes.tokens.back() != token) routes.tokens.push_back(token);
    const int64_t pair = next_pair[expert]++;
    routes.input[pair] = static_cast<int64_t>(routes.tokens.size()) - 1;
    routes.gate[pair] = gate;
  });
  return routes;
}

}  // namespace

// One share while it is computed. Its chunks are, in this order: tokens packed as inputs; rows of
// gate and up, expert by expert; and rows of down of all experts, which add to the output in the
// experts' order. So equal work gives equal bits, and no sum has two writers.
class ExpertJob final : public Task {
 public:
  ExpertJob(const ExpertPages& pages, const FfnKernel& kernel, int threads,
            const ExpertShare& share, Routes&& routes, Scratch&& scratch)
      : ExpertJob(Plan(pages, threads, routes), pages, kernel, share, std::move(routes),
                  std::move(scratch)) {}

  ShareOutcome outcome() const {
    const int64_t position = not_finite_.load();
    return {position == kAllFinite ? -1 : position, static_cast<int64_t>(routes_.experts.size()), 0,
            0, 0};
  }

  Scratch take_scratch() { return std::move(scratch_); }

 private:
  struct Plan {
    int64_t packs, gate_up_rows, gate_ups, down_rows, downs;

    Plan(const ExpertPages& pages, int threads, const Routes& routes) {
      const int64_t width = weight_bytes(pages.format);
      packs = pieces(routes.tokens.size(), kPackTokens);
      gate_up_rows = round_up(pieces(kGateUpBytes, 2 * pages.D * width), kGateUpStep);
      gate_ups = pieces(pages.F, gate_up_rows);
      // As many for each thread as there is length for.
      const int64_t shortest = pieces(kDownBytes, pages.F * width);
      const int64_t for_each = std::max<int64_t>(1, pages.D / (threads * shortest));
      down_rows = round_up(pieces(pages.D, threads * for_each), kDownStep);
      downs = pieces(pages.D, down_rows);
    }
    int64_t chunks(int64_t experts) const {
      return experts ? packs + experts * gate_ups + downs : 0;
    }
  };
  // Countdowns.
  static constexpr size_t kPacked = 0;
  static constexpr size_t activated(size_t expert) { return 1 + expert; }

  ExpertJob(const Plan& plan, const ExpertPages& pages, const FfnKernel& kernel,
            const ExpertShare& share, Routes&& routes, Scratch&& scratch)
      : Task(plan.chunks(routes.experts.size())),
        pages_(pages),
        layer_(pages.layers[share.layer]),
        kernel_(kernel),
        share_(share),
        routes_(std::move(routes)),
        plan_(plan),
        scratch_(std::move(scratch)),
        left_(1 + routes_.experts.size()) {
    const int64_t pairs = routes_.input.size();
    // One line more than a row needs: rows a power of two apart would compete for one cache set.
    const int64_t input_lines = pieces(kernel.input_bytes(pages.D), sizeof(CacheLine)) + 1;
    const int64_t inputs = routes_.tokens.size() * input_lines;
    hidden_floats_ = kernel.hidden_floats(pages.F);
    const int64_t hiddens = pieces(pairs * hidden_floats_ * sizeof(float), sizeof(CacheLine));
    scratch_.resize(inputs + hiddens);
    hidden_ = reinterpret_cast<float*>(scratch_.data() + inputs);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t input = routes_.input[pair];
      inputs_.push_back(scratch_[input * input_lines].bytes);
      outputs_.push_back(share.output + routes_.tokens[input] * pages.D);
    }
    for (size_t input = 0; input < routes_.tokens.size(); ++input) {
      packed_.push_back(scratch_[input * input_lines].bytes);
    }
    left_.set(kPacked, plan.packs);
    for (size_t e = 0; e < routes_.experts.size(); ++e) left_.set(activated(e), plan.gate_ups);
  }

  void run(int64_t chunk) override {
    if (chunk < plan_.packs) return pack(chunk);
    chunk -= plan_.packs;
    const int64_t experts = routes_.experts.size();
    if (chunk < experts * plan_.gate_ups) {
      gate_up(routes_.experts[chunk / plan_.gate_ups], chunk % plan_.gate_ups);
    } else {
      down(chunk - experts * plan_.gate_ups);
    }
  }

  void finished(int64_t chunk) noexcept override {
    if (chunk < plan_.packs) return left_.count(kPacked);
    const size_t expert = (chunk - plan_.packs) / plan_.gate_ups;
    if (expert < routes_.experts.size()) left_.count(activated(expert));
  }

  void pack(int64_t piece) {
    const int64_t stored_bytes = pages_.D * weight_bytes(pages_.format);
    const int64_t last = std::min<int64_t>((piece + 1) * kPackTokens, routes_.tokens.size());
    for (int64_t input = piece * kPackTokens; input < last; ++input) {
      kernel_.pack(share_.hidden + routes_.tokens[input] * stored_bytes, pages_.D, packed_[input]);
    }
  }

  void gate_up(const Routes::Expert& expert, int64_t piece) {
    GateUpRows rows;
    rows.gate_up =
        layer_.gate_up + expert.id * 2 * pages_.F * pages_.D * weight_bytes(pages_.format);
    rows.D = pages_.D;
    rows.F = pages_.F;
    rows.first = piece * plan_.gate_up_rows;
    rows.last = std::min(rows.first + plan_.gate_up_rows, pages_.F);
    rows.tokens = expert.tokens;
    rows.inputs = inputs_.data() + expert.first_pair;
    rows.hidden = hidden_ + expert.first_pair * hidden_floats_;
    left_.wait(kPacked);
    kernel_.gate_up(rows);
  }

  void down(int64_t piece) {
    DownRows rows;
    rows.F = pages_.F;
    rows.first = piece * plan_.down_rows;
    rows.last = std::min(rows.first + plan_.down_rows, pages_.D);
    for (int64_t token = 0; token < share_.tokens; ++token) {
      float* const row = share_.output + token * pages_.D;
      std::fill(row + rows.first, row + rows.last, 0.0f);
    }
    for (size_t e = 0; e < routes_.experts.size() && !cancelled(); ++e) {
      const Routes::Expert& expert = routes_.experts[e];
      rows.down = layer_.down + expert.id * pages_.D * pages_.F * weight_bytes(pages_.format);
      rows.tokens = expert.tokens;
      rows.hidden = hidden_ + expert.first_pair * hidden_floats_;
      rows.gates = routes_.gate.data() + expert.first_pair;
      rows.outputs = outputs_.data() + expert.first_pair;
      left_.wait(activated(e));
      if (!kernel_.down(rows)) note_not_finite(expert.position);
    }
  }

  void note_not_finite(int64_t position) {
    int64_t first = not_finite_.load();
    while (position < first && !not_finite_.compare_exchange_weak(first, position)) {
    }
  }

  const ExpertPages& pages_;
  const ExpertPages::Layer layer_;
  const FfnKernel& kernel_;
  const ExpertShare share_;
  const Routes routes_;
  const Plan plan_;
  Scratch scratch_;
  int64_t hidden_floats_;
  float* hidden_;                         // [pairs, hidden_floats_]
  std::vector<std::byte*> packed_;        // by entry of routes_.tokens
  std::vector<const std::byte*> inputs_;  // by pair
  std::vector<float*> outputs_;           // by pair
  Countdowns left_;
  std::atomic<int64_t> not_finite_{kAllFinite};
};

CpuExperts::CpuExperts(ExpertPages pages, int threads, const std::string& isa,
                       const std::vector<int>& cpus)
    : pages_(std::move(pages)),
      kernel_(find_kernel(isa, pages_.format)),
      threads_(threads),
      owner_(getpid()),
      pool_(std::make_unique<ThreadPool>(threads, cpus)) {}

CpuExperts::~CpuExperts() {
  close();
  // A forked child has no threads to join, so there the pool's memory is left alone.
  if (getpid() != owner_) pool_.release();
}

void CpuExperts::submit(const ExpertShare& share) {
  require_owner();
  if (share.layer < 0 || share.layer >= static_cast<int64_t>(pages_.layers.size())) {
    throw std::out_of_range("CPU experts (native): there is no MoE layer " +
                            std::to_string(share.layer));
  }
  Routes routes = route(share, pages_.experts);
  std::shared_ptr<ExpertJob> former;
  Scratch scratch;
  {
    std::lock_guard lock(mutex_);
    require_open();
    const auto found = jobs_.find(share.layer);
    if (found != jobs_.end()) {
      former = std::move(found->second);
      jobs_.erase(found);
    }
    if (!spare_.empty()) {
      scratch = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  if (former) drop(former);
  // Without an expert there is no chunk that would write the output.
  if (routes.experts.empty()) std::fill_n(share.output, share.tokens * pages_.D, 0.0f);
  auto job = std::make_shared<ExpertJob>(pages_, kernel_, threads_, share, std::move(routes),
                                         std::move(scratch));
  std::lock_guard lock(mutex_);
  require_open();
  pool_->submit(job);
  jobs_[share.layer] = std::move(job);
}

ShareOutcome CpuExperts::collect(int64_t layer) {
  require_owner();
  const auto started = Task::Clock::now();
  std::shared_ptr<ExpertJob> job;
  {
    std::lock_guard lock(mutex_);
    require_open();
    const auto found = jobs_.find(layer);
    if (found == jobs_.end()) {
      throw std::runtime_error("CPU experts (native): nothing was submitted for layer " +
                               std::to_string(layer));
    }
    job = std::move(found->second);
    jobs_.erase(found);
  }
  const TaskOutcome ended = pool_->wait(*job);
  recycle(*job);
  if (ended.error) std::rethrow_exception(ended.error);
  ShareOutcome outcome = job->outcome();
  outcome.busy_us = ended.busy_us;
  outcome.span_us = ended.span_us;
  outcome.wait_us = std::chrono::duration<double, std::micro>(Task::Clock::now() - started).count();
  return outcome;
}

void CpuExperts::reset() {
  require_owner();
  std::unordered_map<int64_t, std::shared_ptr<ExpertJob>> dropped;
  {
    std::lock_guard lock(mutex_);
    dropped.swap(jobs_);
  }
  for (const auto& [layer, job] : dropped) job->cancel();
  for (const auto& [layer, job] : dropped) drop(job);
}

void CpuExperts::close() {
  if (getpid() != owner_) return;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  reset();
  pool_->stop();
}

void CpuExperts::require_open() const {
  if (closed_) throw std::runtime_error("CPU experts (native) are closed");
}

void CpuExperts::require_owner() const {
  if (getpid() != owner_) {
    throw std::runtime_error(
        "CPU experts (native): this process was forked from the one that made them, and their "
        "threads exist only there; make new ones here");
  }
}

void CpuExperts::drop(const std::shared_ptr<ExpertJob>& job) {
  job->cancel();
  pool_->wait(*job);
  recycle(*job);
}

void CpuExperts::recycle(ExpertJob& job) {
  std::lock_guard lock(mutex_);
  spare_.push_back(job.take_scratch());
}

}  // namespace oled_jax
