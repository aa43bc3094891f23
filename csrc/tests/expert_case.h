// One layer's pages and a share of it, with its result in float64, for the tests of this folder.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu_experts.h"

namespace oled_jax {

inline void require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::exit(1);
}

// Eighths from -4 to 4, which every format holds exactly.
struct Values {
  std::vector<double> exact;
  std::vector<std::byte> stored;

  Values(WeightFormat format, int64_t size, std::mt19937& random) {
    for (int64_t i = 0; i < size; ++i) {
      const float value = (static_cast<int>(random() % 9) - 4) / 8.0f;
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      if (format == WeightFormat::kBfloat16) bits >>= 16;
      if (format == WeightFormat::kFloat16 && value != 0) {
        bits = (bits >> 16 & 0x8000) | (((bits & 0x7fffffff) >> 13) - (112 << 10));
      }
      exact.push_back(value);
      const auto* bytes = reinterpret_cast<const std::byte*>(&bits);
      stored.insert(stored.end(), bytes, bytes + weight_bytes(format));
    }
  }
};

struct ExpertCase {
  std::mt19937 random;
  WeightFormat format;
  int64_t experts, D, F, tokens;
  Values gate_up, down, hidden;
  std::vector<int64_t> chosen;      // all but expert 0
  std::vector<int32_t> expert_ids;  // two a token
  std::vector<float> gates;
  std::vector<char> mask;

  ExpertCase(WeightFormat format, int64_t experts, int64_t D, int64_t F, int64_t tokens)
      : random(static_cast<unsigned>(D * 31 + F * 7 + tokens)),
        format(format),
        experts(experts),
        D(D),
        F(F),
        tokens(tokens),
        gate_up(format, experts * 2 * F * D, random),
        down(format, experts * D * F, random),
        hidden(format, tokens * D, random) {
    for (int64_t e = experts - 1; e > 0; --e) chosen.push_back(e);
    for (int64_t t = 0; t < tokens; ++t) {
      const auto first = static_cast<int32_t>(random() % experts);
      expert_ids.push_back(first);
      expert_ids.push_back(static_cast<int32_t>((first + 1) % experts));
      gates.push_back(0.25f);
      gates.push_back(0.5f);
      mask.push_back(t % 5 != 3);
    }
  }

  ExpertPages pages(const std::byte* gate_up_at, const std::byte* down_at, int layers) const {
    return {format, experts, D, F, std::vector<ExpertPages::Layer>(layers, {gate_up_at, down_at})};
  }

  ExpertShare share(int64_t layer, const std::byte* hidden_at, float* output) const {
    return {layer,
            tokens,
            2,
            static_cast<int64_t>(chosen.size()),
            hidden_at,
            chosen.data(),
            expert_ids.data(),
            2,
            gates.data(),
            2,
            reinterpret_cast<const bool*>(mask.data()),
            output};
  }

  void check(const float* output, const std::string& where) const {
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<double> sum(D), size(D);
      for (int64_t k = 0; k < 2 && mask[t]; ++k) {
        if (expert_ids[2 * t + k] != 0) add(t, expert_ids[2 * t + k], gates[2 * t + k], sum, size);
      }
      for (int64_t d = 0; d < D; ++d) {
        require(std::abs(output[t * D + d] - sum[d]) <= 1e-6 * size[d],
                where + ", token " + std::to_string(t) + ", value " + std::to_string(d));
      }
    }
  }

 private:
  // Adds gate * FFN(token), and the sizes of the products in it.
  void add(int64_t token, int64_t expert, double gate, std::vector<double>& sum,
           std::vector<double>& size) const {
    for (int64_t f = 0; f < F; ++f) {
      double projected[2] = {0, 0};
      for (int half = 0; half < 2; ++half) {
        const double* row = &gate_up.exact[((expert * 2 + half) * F + f) * D];
        for (int64_t d = 0; d < D; ++d) projected[half] += row[d] * hidden.exact[token * D + d];
      }
      const double activation = projected[0] / (1 + std::exp(-projected[0])) * projected[1];
      for (int64_t d = 0; d < D; ++d) {
        const double product = gate * activation * down.exact[(expert * D + d) * F + f];
        sum[d] += product;
        size[d] += std::abs(product);
      }
    }
  }
};

}  // namespace oled_jax
