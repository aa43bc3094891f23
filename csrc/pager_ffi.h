#pragma once

#include <nanobind/nanobind.h>

namespace oled_jax {

// Adds the class Pager and the function ffi_targets to the module.
void bind_pager(nanobind::module_& module);

}  // namespace oled_jax
