// AVX2, FMA and F16C: eight float32 values to a register, sixteen registers.

#pragma once

#include <immintrin.h>

#include "ffn_kernel_tile.h"

namespace oled_jax {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  // Four rows by three or four tokens would need more than sixteen registers.
  static constexpr int kFewTokens = 2, kManyRows = 3, kManyTokens = 4;
  // On a Zen 3 the hardware alone leaves 5-14% of the rate unused; further ahead is worse than not.
  static constexpr int64_t kAhead = 384;
  using Vec = __m256;

  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec load_float32(const std::byte* p) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  }
  static Vec load_even_bfloat16(const std::byte* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(load_bits(p), 16));
  }
  static Vec load_odd_bfloat16(const std::byte* p) {
    return _mm256_castsi256_ps(_mm256_and_si256(load_bits(p), _mm256_set1_epi32(-0x10000)));
  }
  static Vec load_float16(const std::byte* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Vec multiply_add(Vec a, Vec b, Vec sum) { return _mm256_fmadd_ps(a, b, sum); }
  static void sum_lanes(Vec a, Vec b, Vec c, Vec d, float* out) {
    const Vec pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
  }

 private:
  static __m256i load_bits(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
};

}  // namespace
}  // namespace oled_jax
