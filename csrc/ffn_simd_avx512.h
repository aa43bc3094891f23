// AVX-512 (F, BW, VL, DQ): sixteen float32 values to a register, thirty-two registers.

#pragma once

#include "ffn_simd_avx2.h"

namespace oled_jax {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16;
  static constexpr int kFewTokens = 4, kManyRows = 4, kManyTokens = 4;
  static constexpr int64_t kAhead = 1536;
  using Vec = __m512;

  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec load_float32(const std::byte* p) { return _mm512_loadu_ps(p); }
  static Vec load_even_bfloat16(const std::byte* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
  }
  static Vec load_odd_bfloat16(const std::byte* p) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(-0x10000)));
  }
  static Vec load_float16(const std::byte* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Vec multiply_add(Vec a, Vec b, Vec sum) { return _mm512_fmadd_ps(a, b, sum); }
  static void sum_lanes(Vec a, Vec b, Vec c, Vec d, float* out) {
    Avx2::sum_lanes(halved(a), halved(b), halved(c), halved(d), out);
  }

 private:
  static __m256 halved(Vec sum) {
    return _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
  }
};

}  // namespace
}  // namespace oled_jax
