// The arithmetic of one expert on one thread: rows of its page against the tokens that chose it.
//
// A kernel is one instruction set level and one weight format. Weights are read as stored, at any
// address, and widened in registers. All sums are float32, and so is the activation between the two
// products. What a row gives does not depend on which other rows are computed by the same call.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace oled_jax {

enum class WeightFormat { kBfloat16, kFloat16, kFloat32 };

constexpr size_t weight_bytes(WeightFormat format) {
  return format == WeightFormat::kFloat32 ? 4 : 2;
}

// Part of the first product and the activation: hidden[t, f] = silu(gate_f . x_t) * (up_f . x_t).
struct GateUpRows {
  const std::byte* gate_up;  // [2F, D], gate rows first
  int64_t D, F;
  int64_t first, last;  // the range of f
  int64_t tokens;
  const std::byte* const* inputs;  // by token, from `pack`
  float* hidden;                   // [tokens, hidden_floats(F)], in the order that `down` reads
};

// Part of the second product: outputs[t][d] += gates[t] * (down_d . hidden_t).
struct DownRows {
  const std::byte* down;  // [D, F]
  int64_t F;
  int64_t first, last;  // the range of d
  int64_t tokens;
  const float* hidden;
  const float* gates;     // by token
  float* const* outputs;  // by token, rows of D
};

struct FfnKernel {
  // A token's input row: its packed size, and how to pack it from [D] stored values.
  size_t (*input_bytes)(int64_t D);
  void (*pack)(const std::byte* row, int64_t D, std::byte* packed);
  // Floats of one token's row of activations.
  int64_t (*hidden_floats)(int64_t F);
  void (*gate_up)(const GateUpRows&);
  // False if a value that was added is not finite.
  bool (*down)(const DownRows&);
};

// The levels that this machine can run, the fastest last.
std::vector<std::string> isa_levels();

// Throws std::invalid_argument unless `isa` is one of isa_levels().
const FfnKernel& find_kernel(const std::string& isa, WeightFormat format);

// One file per level; call it only where the machine has that level.
const FfnKernel& portable_kernel(WeightFormat format);
#if defined(__x86_64__) && !defined(OLED_JAX_ONLY_PORTABLE)
const FfnKernel& avx2_kernel(WeightFormat format);
const FfnKernel& avx512_kernel(WeightFormat format);
const FfnKernel& avx512bf16_kernel(WeightFormat format);
#endif

}  // namespace oled_jax
