// The Python module oled_jax._native: what each file of this folder offers, in one place.

#include <nanobind/nanobind.h>

#include "cpu_experts.h"
#include "pager_ffi.h"
#include "planning.h"

namespace nb = nanobind;

NB_MODULE(_native, module) {
  module.doc() = "Compiled parts of oled_jax; use them through oled_jax.native.";
  oled_jax::bind_cpu_experts(module);
  oled_jax::bind_pager(module);
  oled_jax::bind_planning(module);
}
