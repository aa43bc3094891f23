// What Python sees of the CPU experts. Arrays of weights and hidden states come as bytes.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "cpu_experts.h"
#include "host_read.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace oled_jax {
namespace {

template <class Value, size_t kDims>
using Array = nb::ndarray<Value, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
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

// The engine with the sizes that arrays are checked against. Python keeps the arrays alive.
class PyCpuExperts {
 public:
  PyCpuExperts(const std::vector<std::tuple<Bytes, Bytes>>& layers, const std::string& dtype,
               int64_t experts, int64_t D, int64_t F, int threads, const std::string& isa,
               const std::vector<int>& cpus)
      : row_bytes_(D * static_cast<int64_t>(weight_bytes(weight_format(dtype)))),
        D_(D),
        engine_(expert_pages(layers, dtype, experts, D, F), threads, isa, cpus) {}

  void submit(int64_t layer, const Bytes& hidden, const Array<const int32_t, 1>& experts,
              const Array<const int32_t, 2>& expert_ids, const Array<const float, 2>& gates,
              const Array<const bool, 1>& token_mask, const Array<float, 2>& output) {
    ExpertShare share;
    share.layer = layer;
    share.tokens = static_cast<int64_t>(expert_ids.shape(0));
    share.top_k = static_cast<int64_t>(expert_ids.shape(1));
    share.count = static_cast<int64_t>(experts.shape(0));
    if (gates.shape(0) != expert_ids.shape(0) || gates.shape(1) != expert_ids.shape(1) ||
        token_mask.shape(0) != expert_ids.shape(0) || output.shape(0) != expert_ids.shape(0) ||
        static_cast<int64_t>(output.shape(1)) != D_) {
      throw std::invalid_argument("CPU experts (native): arrays of different numbers of tokens");
    }
    share.hidden = bytes(hidden, share.tokens * row_bytes_);
    share.experts = experts.data();
    share.expert_ids = expert_ids.data();
    share.gates = gates.data();
    share.token_mask = token_mask.data();
    share.output = output.data();
    nb::gil_scoped_release released;  // dropping a former share waits for its chunks in progress
    engine_.submit(share);
  }

  std::tuple<int64_t, int64_t, double, double, double> collect(int64_t layer) {
    const ShareOutcome outcome = engine_.collect(layer);
    return {outcome.not_finite, outcome.pages, outcome.busy_us, outcome.span_us, outcome.wait_us};
  }

  void reset() { engine_.reset(); }
  void close() { engine_.close(); }

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

  const int64_t row_bytes_, D_;
  CpuExperts engine_;
};

}  // namespace

void bind_cpu_experts(nb::module_& module) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<PyCpuExperts>(module, "CpuExperts")
      .def(nb::init<const std::vector<std::tuple<Bytes, Bytes>>&, const std::string&, int64_t,
                    int64_t, int64_t, int, const std::string&, const std::vector<int>&>(),
           nb::kw_only(), "layers"_a, "dtype"_a, "experts"_a, "D"_a, "F"_a, "threads"_a, "isa"_a,
           "cpus"_a)
      .def("submit", &PyCpuExperts::submit, "layer"_a, "hidden"_a.noconvert(),
           "experts"_a.noconvert(), "expert_ids"_a.noconvert(), "gates"_a.noconvert(),
           "token_mask"_a.noconvert(), "output"_a.noconvert())
      .def("collect", &PyCpuExperts::collect, "layer"_a, Released(),
           "(position of the first expert whose result is not finite or -1, pages, busy_us, "
           "span_us, wait_us)")
      .def("reset", &PyCpuExperts::reset, Released())
      .def("close", &PyCpuExperts::close, Released());
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
