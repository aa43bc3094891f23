#pragma once

#include <cstddef>

namespace oled_jax {

// GB/s at which `threads` threads read the bytes for this long, each a part of its own.
double host_read_gbs(const std::byte* data, size_t size, int threads, double seconds);

}  // namespace oled_jax
