// The arithmetic of planning a layer, for the functions of oled_jax that `native.compiled` decorates.
//
// Each has the contract and the result, bit for bit, of the NumPy function of its name.

#pragma once

#include <nanobind/nanobind.h>

namespace oled_jax {

// Adds the submodule `planning`.
void bind_planning(nanobind::module_& module);
// Adds to it what only `oled+` needs.
void bind_reuse(nanobind::module_& planning);
// Adds to it what plans whole layers.
void bind_layer_planner(nanobind::module_& planning);

}  // namespace oled_jax
