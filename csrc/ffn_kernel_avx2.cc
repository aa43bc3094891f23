#include "ffn_simd_avx2.h"

namespace oled_jax {

const FfnKernel& avx2_kernel(WeightFormat format) { return widened_kernel<Avx2>(format); }

}  // namespace oled_jax
