// Plans whole layers in one call, for policies whose parts it knows. See
// oled_jax/offload/compiled_planner.py, which says when; the steps are those of planning.h.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "planning.h"
#include "planning_steps.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace oled_jax {
namespace {

using Clock = std::chrono::steady_clock;

double microseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

// An array that is kept.
template <class View>
void keep(View& view, nb::object array) {
  require(view.own(std::move(array)), "an array of another dtype, rank or layout");
}

class LayerPlanner {
 public:
  LayerPlanner(nb::object slot, nb::object last_use, nb::object free, nb::object resident,
               nb::object loads, double reuse_weight, int64_t swaps, SplitCosts costs)
      : reuse_weight_(reuse_weight), swaps_(swaps), costs_(costs) {
    keep(slot_, std::move(slot));
    keep(last_use_, std::move(last_use));
    keep(free_, std::move(free));
    keep(resident_, std::move(resident));
    keep(loads_, std::move(loads));
    const int64_t E = loads_.size();
    require(resident_.size() == E && slot_.shape(1) == E && last_use_.shape(1) == E,
            "tables of different numbers of experts");
    experts_.resize(E);
    ranked_.resize(E);
    slots_.resize(E);
    ends_.resize(E + 1);
    keep_.reset(new bool[E]);
  }

  // weights: None where scores are what they are; then kept_ids and kept_gates are, too.
  void begin_pass(int64_t pass_number, bool transfers_all, nb::object capacities,
                  nb::object token_mask, nb::object expert_ids, nb::object gates, nb::object scores,
                  nb::object weights, nb::object kept_ids, nb::object kept_gates, int64_t rows,
                  nb::object bounds) {
    pass_number_ = pass_number;
    transfers_all_ = transfers_all;
    rows_ = rows;
    scored_ = !weights.is_none();
    keep(capacities_, std::move(capacities));
    keep(token_mask_, std::move(token_mask));
    keep(expert_ids_, std::move(expert_ids));
    keep(gates_, std::move(gates));
    keep(scores_, std::move(scores));
    keep(bounds_, std::move(bounds));
    require(capacities_.size() == slot_.shape(0) && scores_.shape(0) == slot_.shape(0) &&
                scores_.shape(1) == loads_.size(),
            "tables of different sizes");
    if (!scored_) return;
    keep(weights_, std::move(weights));
    keep(kept_ids_, std::move(kept_ids));
    keep(kept_gates_, std::move(kept_gates));
  }

  // Returns how many slots are free then, and the experts that the CPU computes, or None.
  nb::tuple plan(int64_t layer, int64_t num_free, const NumpyView<const int32_t, 2>& packed,
                 const NumpyView<int32_t>& plan) {
    const int64_t E = loads_.size();
    require(0 <= layer && layer < slot_.shape(0), "no such layer");
    unpack(packed, token_mask_, expert_ids_, gates_, loads_);
    found_ = activate(layer, pass_number_, loads_, slot_, last_use_, resident_,
                      experts_.data());
    const Numbers hits = Numbers::over(experts_.data(), {found_.hits});
    const Numbers misses = Numbers::over(experts_.data() + found_.hits, {found_.misses});

    const auto activated = Clock::now();
    if (scored_) {
      score_layer(layer, expert_ids_, gates_, weights_, kept_ids_, kept_gates_, scores_);
    }
    const auto scored = Clock::now();
    const Reals scores = Reals::over(scores_.row(layer), {E});
    split(misses, scores);
    const auto dispatched = Clock::now();
    const Numbers to_gpu = Numbers::over(ranked_.data(), {to_gpu_});
    const Numbers to_cpu = Numbers::over(ranked_.data() + to_gpu_, {found_.misses - to_gpu_});
    const Numbers last_use = Numbers::over(last_use_.row(layer), {E});
    capacity_ = capacities_[layer];
    choose_residents(resident_, to_gpu, scores, last_use, capacity_, keep_.get());
    priority_us_ += microseconds(scored - activated + (Clock::now() - dispatched));
    dispatch_us_ += microseconds(dispatched - scored);

    const auto ends = NumpyView<int32_t>::over(ends_.data(), {E + 1});
    const Moved moved =
        move_pages(layer, num_free, hits, misses, to_gpu, to_cpu, Flags::over(keep_.get(), {E}),
                   capacity_, slot_, free_, ends, slots_.data());
    if (moved.fault) throw std::logic_error("a compiled decision breaks the engine's rules");
    write_layer(expert_ids_, token_mask_, hits, to_gpu,
                NumpyView<const int32_t>::over(slots_.data(), {found_.hits + to_gpu_}),
                NumpyView<const int32_t>::over(ends_.data(), {moved.rounds}), rows_, bounds_, plan);
    nb::object on_cpu = nb::none();
    if (to_cpu.size() > 0) on_cpu = new_array(to_cpu.begin(), to_cpu.size());
    return nb::make_tuple(moved.num_free, on_cpu);
  }

  // Of the layer that was planned last: hits, misses, to_gpu, to_cpu, keep and its capacity.
  nb::tuple decided() const {
    const int64_t to_cpu = found_.misses - to_gpu_;
    return nb::make_tuple(new_array(experts_.data(), found_.hits),
                          new_array(experts_.data() + found_.hits, found_.misses),
                          new_array(ranked_.data(), to_gpu_),
                          new_array(ranked_.data() + to_gpu_, to_cpu),
                          new_array(keep_.get(), loads_.size()), capacity_);
  }

  // Microseconds of priority and of dispatch since the last call.
  nb::tuple take_times() {
    return nb::make_tuple(std::exchange(priority_us_, 0.0), std::exchange(dispatch_us_, 0.0));
  }

 private:
  // Ranks the misses, those to transfer first.
  void split(const Numbers& misses, const Reals& scores) {
    if (transfers_all_ || misses.size() == 0) {
      std::copy(misses.begin(), misses.end(), ranked_.begin());
      to_gpu_ = misses.size();
      return;
    }
    const double reuse_scale =
        reuse_weight_ * static_cast<double>(found_.hits + found_.misses) * costs_.h2d_us;
    to_gpu_ = balance(misses, loads_, scores, costs_, reuse_scale, swaps_, ranked_.data());
  }

  const double reuse_weight_;
  const int64_t swaps_;
  const SplitCosts costs_;
  NumpyView<int32_t, 2> slot_;
  NumpyView<int64_t, 2> last_use_;
  NumpyView<int32_t> free_;
  NumpyView<bool> resident_;
  NumpyView<int64_t> loads_;

  // Of the pass.
  int64_t pass_number_ = 0, rows_ = 0;
  bool transfers_all_ = false, scored_ = false;
  Numbers capacities_;
  Flags token_mask_;
  NumpyView<int32_t, 2> expert_ids_;
  NumpyView<float, 2> gates_;
  NumpyView<double, 2> scores_;
  Reals weights_;
  NumpyView<int32_t, 3> kept_ids_;
  NumpyView<float, 3> kept_gates_;
  NumpyView<const int64_t, 2> bounds_;

  // Of the layer that was planned last.
  Activated found_{0, 0};
  int64_t to_gpu_ = 0, capacity_ = 0;
  std::vector<int64_t> experts_, ranked_;
  std::vector<int32_t> slots_, ends_;
  std::unique_ptr<bool[]> keep_;
  double priority_us_ = 0.0, dispatch_us_ = 0.0;
};

}  // namespace

void bind_layer_planner(nb::module_& planning) {
  nb::class_<LayerPlanner>(planning, "LayerPlanner")
      .def(
          "__init__",
          [](LayerPlanner* self, nb::object slot, nb::object last_use, nb::object free,
             nb::object resident, nb::object loads, double h2d_us, double cpu_fixed_us,
             double cpu_token_us, double reuse_weight, int64_t swaps) {
            new (self) LayerPlanner(std::move(slot), std::move(last_use), std::move(free),
                                    std::move(resident), std::move(loads), reuse_weight, swaps,
                                    {h2d_us, cpu_fixed_us, cpu_token_us});
          },
          "slot"_a, "last_use"_a, "free"_a, "resident"_a, "loads"_a, "h2d_us"_a, "cpu_fixed_us"_a,
          "cpu_token_us"_a, "reuse_weight"_a, "swaps"_a)
      .def("begin_pass", &LayerPlanner::begin_pass, "pass_number"_a, "transfers_all"_a,
           "capacities"_a, "token_mask"_a, "expert_ids"_a, "gates"_a, "scores"_a,
           "weights"_a.none(), "kept_ids"_a.none(), "kept_gates"_a.none(), "rows"_a, "bounds"_a)
      .def("plan", &LayerPlanner::plan)
      .def("decided", &LayerPlanner::decided)
      .def("take_times", &LayerPlanner::take_times);
}

}  // namespace oled_jax
