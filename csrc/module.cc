// The Python module oled_jax._native: what each file of this folder offers, in one place.

#define OLED_JAX_IMPORTS_NUMPY  // the other files use what this one imports

#include "cpu_experts.h"
#include "numpy_view.h"
#include "pager_ffi.h"
#include "planning.h"

namespace nb = nanobind;

NB_MODULE(_native, module) {
  if (_import_array() < 0) throw nb::python_error();
  module.doc() = "Compiled parts of oled_jax; use them through oled_jax.native.";
  oled_jax::bind_cpu_experts(module);
  oled_jax::bind_pager(module);
  oled_jax::bind_planning(module);
}
