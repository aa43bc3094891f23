#include "ffn_simd_avx512.h"

namespace oled_jax {

const FfnKernel& avx512_kernel(WeightFormat format) { return widened_kernel<Avx512>(format); }

}  // namespace oled_jax
