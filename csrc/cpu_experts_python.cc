// What Python sees of the CPU experts. Arrays of weights and hidden states come as bytes.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "cpu_experts.h"
#include "host_read.h"
#include "numpy_view.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace oled_jax {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;

const std::byte* bytes(const Bytes& array, int64_t size) {
  if (static_cast<int64_t>(array.nbytes()) != size) {
    throw std::invalid_argument("CPU experts (native): an array has " +
                                std::to_string(array.nbytes()) + " bytes, not " +
                                std::to_string(size));
  }
  return reinterpret_cast<const std::byte*>(array.data());
}

WeightFormat weight_format(const std::string& dtype) {
  if (dtype == "bfloat16") return WeightFormat::kBfloat16;
  if (dtype == "float16") return WeightFormat::kFloat16;
  if (dtype == "float32") return WeightFormat::kFloat32;
  throw std::invalid_argument("CPU experts (native): no weights are " + dtype);
}

// The engine with the sizes that arrays are checked against, and its outputs. Python keeps the
// hidden states alive.
class PyCpuExperts {
 public:
  PyCpuExperts(const std::vector<std::tuple<Bytes, Bytes>>& layers, const std::string& dtype,
               int64_t experts, int64_t D, int64_t F, int threads, const std::string& isa,
               const std::vector<int>& cpus)
      : row_bytes_(D * static_cast<int64_t>(weight_bytes(weight_format(dtype)))),
        D_(D),
        engine_(expert_pages(layers, dtype, experts, D, F), threads, isa, cpus) {}

  void submit(int64_t layer, const NumpyView<const uint8_t, 2>& hidden,
              const NumpyView<const int64_t>& experts,
              const NumpyView<const int32_t, 2>& expert_ids,
              const NumpyView<const float, 2>& gates, const NumpyView<const bool>& token_mask) {
    ExpertShare share;
    share.layer = layer;
    share.tokens = expert_ids.shape(0);
    share.top_k = expert_ids.shape(1);
    share.count = experts.size();
    if (hidden.shape(0) != share.tokens || gates.shape(0) != share.tokens ||
        gates.shape(1) != share.top_k || token_mask.size() != share.tokens) {
      throw std::invalid_argument("CPU experts (native): arrays of different numbers of tokens");
    }
    if (hidden.shape(1) != row_bytes_) {
      throw std::invalid_argument("CPU experts (native): tokens of " +
                                  std::to_string(hidden.shape(1)) + " bytes, not " +
                                  std::to_string(row_bytes_));
    }
    share.hidden = reinterpret_cast<const std::byte*>(hidden.begin());
    share.experts = experts.begin();
    share.expert_ids = expert_ids.begin();
    share.ids_step = expert_ids.row_step();
    share.gates = gates.begin();
    share.gates_step = gates.row_step();
    share.token_mask = token_mask.begin();
    std::unique_ptr<float[]> output(new float[share.tokens * D_]);
    share.output = output.get();
    {
      nb::gil_scoped_release released;  // dropping a former share waits for its chunks in progress
      engine_.submit(share);
    }
    outputs_[layer] = {std::move(output), static_cast<size_t>(share.tokens)};
  }

  nb::tuple collect(int64_t layer) {
    auto output = outputs_.extract(layer);
    ShareOutcome outcome;
    {
      nb::gil_scoped_release released;
      outcome = engine_.collect(layer);
    }
    auto& [sums, tokens] = output.mapped();
    nb::capsule owner(sums.get(),
                      [](void* memory) noexcept { delete[] static_cast<float*>(memory); });
    nb::ndarray<nb::numpy, float> array(sums.release(), {tokens, static_cast<size_t>(D_)}, owner);
    return nb::make_tuple(array, outcome.not_finite, outcome.pages, outcome.busy_us,
                          outcome.span_us, outcome.wait_us);
  }

  void reset() {
    {
      nb::gil_scoped_release released;
      engine_.reset();
    }
    outputs_.clear();
  }

  void close() {
    {
      nb::gil_scoped_release released;
      engine_.close();
    }
    outputs_.clear();
  }

 private:
  static ExpertPages expert_pages(const std::vector<std::tuple<Bytes, Bytes>>& layers,
                                  const std::string& dtype, int64_t experts, int64_t D, int64_t F) {
    ExpertPages pages{weight_format(dtype), experts, D, F, {}};
    const int64_t down = experts * D * F * static_cast<int64_t>(weight_bytes(pages.format));
    for (const auto& [gate_up_bytes, down_bytes] : layers) {
      pages.layers.push_back({bytes(gate_up_bytes, 2 * down), bytes(down_bytes, down)});
    }
    return pages;
  }

  struct Output {
    std::unique_ptr<float[]> sums;  // [tokens, D]
    size_t tokens;
  };

  const int64_t row_bytes_, D_;
  // By layer, of what was not collected. Guarded by the GIL.
  std::unordered_map<int64_t, Output> outputs_;
  CpuExperts engine_;  // ends before the memory that its threads write to
};

}  // namespace

void bind_cpu_experts(nb::module_& module) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<PyCpuExperts>(module, "CpuExperts")
      .def(nb::init<const std::vector<std::tuple<Bytes, Bytes>>&, const std::string&, int64_t,
                    int64_t, int64_t, int, const std::string&, const std::vector<int>&>(),
           nb::kw_only(), "layers"_a, "dtype"_a, "experts"_a, "D"_a, "F"_a, "threads"_a, "isa"_a,
           "cpus"_a)
      .def("submit", &PyCpuExperts::submit, "layer"_a, "hidden"_a.noconvert(), "experts"_a,
           "expert_ids"_a, "gates"_a, "token_mask"_a,
           "hidden: [N, bytes of a token], unchanged until the share is collected or dropped.")
      .def("collect", &PyCpuExperts::collect, "layer"_a,
           "(output, position of the first expert whose result is not finite or -1, pages, "
           "busy_us, span_us, wait_us)")
      .def("reset", &PyCpuExperts::reset)
      .def("close", &PyCpuExperts::close);
  module.def("cpu_isa_levels", &isa_levels,
             "Instruction set levels of this machine, fastest last.");
  module.def(
      "host_read_gbs",
      [](const Bytes& array, int threads, double seconds) {
        return host_read_gbs(reinterpret_cast<const std::byte*>(array.data()), array.nbytes(),
                             threads, seconds);
      },
      "array"_a.noconvert(), "threads"_a, "seconds"_a, Released(),
      "GB/s at which threads read an array of bytes, over and over, each its own part.");
}

}  // namespace oled_jax
