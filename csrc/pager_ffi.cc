// The pager as XLA calls it (FFI handlers) and as Python makes it.

#include "pager_ffi.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pager.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace oled_jax {
namespace {

// Runs `work`; what it throws becomes the program's error, which JAX raises.
template <typename Work>
ffi::Error guarded(Work&& work) {
  try {
    work();
    return ffi::Error::Success();
  } catch (nb::python_error& error) {
    nb::gil_scoped_acquire gil;
    std::string what = error.what();
    error.restore();
    PyErr_Clear();
    return ffi::Error::Internal("oled_jax: " + what);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("oled_jax: ") + error.what());
  }
}

void require_in_place(const ffi::AnyBuffer& operand, ffi::Result<ffi::AnyBuffer>& result) {
  if (operand.untyped_data() != result->untyped_data()) {
    throw std::runtime_error("XLA does not update a donated buffer in place");
  }
}

ffi::Error route(Stream stream, ffi::AnyBuffer packed, ffi::AnyBuffer gate_up, ffi::AnyBuffer down,
                 ffi::RemainingArgs more, ffi::Result<ffi::AnyBuffer> gate_up_out,
                 ffi::Result<ffi::AnyBuffer> down_out, ffi::Result<ffi::BufferR1<ffi::S32>> plan,
                 int32_t layer, ffi::Span<const int64_t> offsets) {
  return guarded([&] {
    require_in_place(gate_up, gate_up_out);
    require_in_place(down, down_out);
    if (offsets.size() != kPlanFields) throw std::runtime_error("the plan has other fields");
    RouteCall call{};
    call.layer = layer;
    call.packed = packed.untyped_data();
    call.tokens = packed.dimensions()[0];
    call.columns = packed.dimensions()[1];
    if (more.size() > 0) {
      ffi::AnyBuffer hidden = more.get<ffi::AnyBuffer>(0).value();
      call.hidden = hidden.untyped_data();
      call.hidden_bytes = hidden.size_bytes() / call.tokens;
    }
    call.plan = plan->typed_data();
    call.plan_size = plan->element_count();
    std::copy(offsets.begin(), offsets.end(), reinterpret_cast<int64_t*>(&call.offsets));
    Pager::at(gate_up.untyped_data()).route(stream, call);
  });
}

ffi::Error land(Stream stream, ffi::AnyBuffer out, ffi::AnyBuffer gate_up,
                ffi::Result<ffi::AnyBuffer> out_after) {
  return guarded([&] {
    require_in_place(out, out_after);
    Pager::at(gate_up.untyped_data()).land(stream);
  });
}

ffi::Error collect(Stream stream, ffi::AnyBuffer, ffi::AnyBuffer gate_up,
                   ffi::Result<ffi::BufferR2<ffi::F32>> share, int32_t layer) {
  return guarded([&] {
    Pager::at(gate_up.untyped_data())
        .collect(stream, layer, share->typed_data(), share->dimensions()[0], share->dimensions()[1]);
  });
}

template <typename Binding>
auto bind_route(Binding binding) {
  return std::move(binding).template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::BufferR1<ffi::S32>>()
      .template Attr<int32_t>("layer")
      .template Attr<ffi::Span<const int64_t>>("offsets");
}

template <typename Binding>
auto bind_land(Binding binding) {
  return std::move(binding).template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>();
}

template <typename Binding>
auto bind_collect(Binding binding) {
  return std::move(binding).template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::BufferR2<ffi::F32>>()
      .template Attr<int32_t>("layer");
}

auto on_cuda() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>(); }
auto on_host() { return ffi::Ffi::Bind(); }

XLA_FFI_DEFINE_HANDLER(kRouteCuda, route, bind_route(on_cuda()));
XLA_FFI_DEFINE_HANDLER(kLandCuda, land, bind_land(on_cuda()));
XLA_FFI_DEFINE_HANDLER(kCollectCuda, collect, bind_collect(on_cuda()));

// On the CPU platform there is no stream.
ffi::Error route_host(ffi::AnyBuffer packed, ffi::AnyBuffer gate_up, ffi::AnyBuffer down,
                      ffi::RemainingArgs more, ffi::Result<ffi::AnyBuffer> gate_up_out,
                      ffi::Result<ffi::AnyBuffer> down_out,
                      ffi::Result<ffi::BufferR1<ffi::S32>> plan, int32_t layer,
                      ffi::Span<const int64_t> offsets) {
  return route(nullptr, packed, gate_up, down, more, gate_up_out, down_out, plan, layer, offsets);
}

ffi::Error land_host(ffi::AnyBuffer out, ffi::AnyBuffer gate_up,
                     ffi::Result<ffi::AnyBuffer> out_after) {
  return land(nullptr, out, gate_up, out_after);
}

ffi::Error collect_host(ffi::AnyBuffer after, ffi::AnyBuffer gate_up,
                        ffi::Result<ffi::BufferR2<ffi::F32>> share, int32_t layer) {
  return collect(nullptr, after, gate_up, share, layer);
}

XLA_FFI_DEFINE_HANDLER(kRouteHost, route_host, bind_route(on_host()));
XLA_FFI_DEFINE_HANDLER(kLandHost, land_host, bind_land(on_host()));
XLA_FFI_DEFINE_HANDLER(kCollectHost, collect_host, bind_collect(on_host()));

nb::dict ffi_targets() {
  auto capsule = [](auto* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); };
  nb::dict cuda, host, targets;
  cuda["oled_jax_route"] = capsule(kRouteCuda);
  cuda["oled_jax_land"] = capsule(kLandCuda);
  cuda["oled_jax_collect"] = capsule(kCollectCuda);
  host["oled_jax_route"] = capsule(kRouteHost);
  host["oled_jax_land"] = capsule(kLandHost);
  host["oled_jax_collect"] = capsule(kCollectHost);
  targets["CUDA"] = cuda;
  targets["cpu"] = host;
  return targets;
}

nb::dict as_dict(const PagerStatistics& statistics) {
  nb::dict values;
  values["routes"] = statistics.routes;
  values["transport_us"] = statistics.transport_us;
  values["accounting_us"] = statistics.accounting_us;
  values["planning_us"] = statistics.planning_us;
  values["issue_us"] = statistics.issue_us;
  values["collect_us"] = statistics.collect_us;
  values["moved_us"] = statistics.moved_us;
  values["moved_bytes"] = statistics.moved_bytes;
  values["ahead_bytes"] = statistics.ahead_bytes;
  values["cancelled_pages"] = statistics.cancelled_pages;
  return values;
}

}  // namespace

void bind_pager(nb::module_& module) {
  using Addresses = std::vector<std::pair<uintptr_t, uintptr_t>>;
  nb::class_<Pager>(module, "Pager")
      .def(
          "__init__",
          [](Pager* self, const std::string& platform, int device, const Addresses& store,
             size_t gate_up_bytes, size_t down_bytes, nb::object manager, nb::object dtype) {
            std::vector<LayerStore> layers;
            for (auto [gate_up, down] : store) {
              layers.push_back({reinterpret_cast<const char*>(gate_up),
                                reinterpret_cast<const char*>(down)});
            }
            auto link = platform == "cpu" ? make_host_link() : make_cuda_link(device);
            new (self) Pager(std::move(link), std::move(layers), gate_up_bytes, down_bytes,
                             std::move(manager), std::move(dtype));
          },
          nb::arg("platform"), nb::arg("device"), nb::arg("store"), nb::arg("gate_up_bytes"),
          nb::arg("down_bytes"), nb::arg("manager").none(), nb::arg("dtype"))
      .def(
          "attach",
          [](Pager& self, uintptr_t gate_up, uintptr_t down, size_t slots) {
            self.attach(reinterpret_cast<char*>(gate_up), reinterpret_cast<char*>(down), slots);
          },
          nb::arg("gate_up"), nb::arg("down"), nb::arg("slots"))
      .def("stage", &Pager::stage, nb::arg("layer"), nb::arg("experts"), nb::arg("slots"))
      // Waits for pages: other threads of the interpreter must not wait, too.
      .def("drain", &Pager::drain, nb::call_guard<nb::gil_scoped_release>())
      .def("reset", &Pager::reset)
      .def("statistics", [](Pager& self) { return as_dict(self.statistics()); });
  module.def("ffi_targets", &ffi_targets);
}

}  // namespace oled_jax
