// What the planning functions take, and how they refuse it.

#pragma once

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

}  // namespace oled_jax
