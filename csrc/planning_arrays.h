// What the planning functions take, and how they refuse it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "numpy_view.h"

namespace oled_jax {

using Flags = NumpyView<const bool>;
using Numbers = NumpyView<const int64_t>;
using Reals = NumpyView<const double>;

inline void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

// A copy for Python.
template <class T>
nanobind::object new_array(const T* values, int64_t size) {
  NewArray<T> array(size);
  std::copy_n(values, size, array.begin());
  return array.object();
}

}  // namespace oled_jax
