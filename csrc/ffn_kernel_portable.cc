// Plain C++ with the vector types of GCC and Clang, which every target has: SSE2, NEON or scalars.

#include "ffn_kernel_tile.h"

namespace oled_jax {
namespace {

struct Portable {
  static constexpr int kLanes = 4;
  static constexpr int kFewTokens = 2, kManyRows = 4, kManyTokens = 2;
  static constexpr int64_t kAhead = 0;
  typedef float Vec __attribute__((vector_size(16)));
  typedef uint32_t Bits __attribute__((vector_size(16)));
  struct Halves {
    uint16_t bits[kLanes];
  };

  template <class Value>
  static Value load(const std::byte* p) {
    Value value;
    std::memcpy(&value, p, sizeof(value));
    return value;
  }
  static Vec zero() { return Vec{}; }
  static Vec load_float32(const std::byte* p) { return load<Vec>(p); }
  static Vec load_even_bfloat16(const std::byte* p) {
    return reinterpret_cast<Vec>(load<Bits>(p) << 16);
  }
  static Vec load_odd_bfloat16(const std::byte* p) {
    return reinterpret_cast<Vec>(load<Bits>(p) & 0xffff0000u);
  }
  static Vec load_float16(const std::byte* p) {
    const Halves half = load<Halves>(p);
    const Bits bits = {half.bits[0], half.bits[1], half.bits[2], half.bits[3]};
    // The exponents differ by 112; the product is exact and makes subnormal values normal.
    const Vec size = reinterpret_cast<Vec>((bits & 0x7fffu) << 13) * 0x1p112f;
    const Bits special = reinterpret_cast<Bits>((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return reinterpret_cast<Vec>(reinterpret_cast<Bits>(size) | special | (bits & 0x8000u) << 16);
  }
  static Vec multiply_add(Vec a, Vec b, Vec sum) { return sum + a * b; }
  static void sum_lanes(Vec a, Vec b, Vec c, Vec d, float* out) {
    const Vec sums[] = {a, b, c, d};
    for (const Vec& sum : sums) *out++ = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
};

}  // namespace

const FfnKernel& portable_kernel(WeightFormat format) { return widened_kernel<Portable>(format); }

}  // namespace oled_jax
