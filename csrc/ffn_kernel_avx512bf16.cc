// AVX-512 with bfloat16 dot products. Inputs are bfloat16 as stored, so the first product uses
// them: no widening, half the input bytes, float32 sums (subnormal values count as zero). The
// activations are float32, so the second product is AVX-512's, and so are all products of other
// formats.

#include "ffn_simd_avx512.h"

namespace oled_jax {
namespace {

struct Bfloat16Dot {
  using Simd = Avx512;
  static constexpr int kParts = 1;
  static constexpr int kStep = 32;
  static constexpr int kBytes = 2;
  static constexpr int kInputBytes = 2;
  static constexpr int64_t kAhead = Simd::kAhead;

  template <int>
  static __m512bh weights(const std::byte* p) {
    return (__m512bh)_mm512_loadu_si512(p);  // a cast of vectors: the bits stay
  }
  template <int>
  static __m512bh input(const std::byte* p) {
    return weights<0>(p);
  }
  static __m512 add(__m512 sum, __m512bh w, __m512bh x) { return _mm512_dpbf16_ps(sum, w, x); }
  static void pack(const std::byte* p, std::byte* packed) {
    _mm512_storeu_si512(packed, _mm512_loadu_si512(p));
  }
};

}  // namespace

const FfnKernel& avx512bf16_kernel(WeightFormat format) {
  if (format != WeightFormat::kBfloat16) return avx512_kernel(format);
  return Ffn<Bfloat16Dot, Widened<Avx512, WeightFormat::kBfloat16>>::kKernel;
}

}  // namespace oled_jax
