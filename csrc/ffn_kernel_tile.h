// The loops that every instruction set level shares. Included once by each level's file.
//
// Everything is in an unnamed namespace, and no function of the standard library is called: a copy
// shared between files would be compiled with one level's instructions and run on every machine.
//
// A `Simd` describes a level's float32 registers: Vec, kLanes, zero(), multiply_add(a, b, sum),
// loads of stored weights, sum_lanes(four vectors, out); the tiles whose sums fit them, kMaxRows
// rows by kFewTokens tokens, and for more tokens than that kManyRows by kManyTokens; and the kAhead
// of products that widen. A `Product` says how weights meet inputs, a step of kStep values at a
// time, which is loaded in kParts parts:
//   kAhead                           bytes by which weights are prefetched, or 0
//   kBytes, kInputBytes              bytes of a stored weight and of a packed input value
//   weights<part>(p), input<part>(p) load a part of the step at p
//   add(sum, w, x)                   adds a part's products to the lanes of `sum`
//   pack(p, packed)                  packs a step of stored values as an input
//   position(i)                      where value i of a step lies in a packed step of float32

#pragma once

#include <cfloat>
#include <cstring>

#include "ffn_kernel.h"

namespace oled_jax {
namespace {

constexpr int kMaxRows = 4;  // of a tile

constexpr int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Weights widened to float32, against float32 inputs.
template <class SimdType, WeightFormat kFormat>
struct Widened {
  using Simd = SimdType;
  using Vec = typename Simd::Vec;
  static constexpr int kParts = 2;
  static constexpr int kStep = kParts * Simd::kLanes;
  static constexpr int64_t kAhead = Simd::kAhead;
  static constexpr int kBytes = static_cast<int>(weight_bytes(kFormat));
  static constexpr int kInputBytes = sizeof(float);

  template <int kPart>
  static Vec weights(const std::byte* p) {
    if constexpr (kFormat == WeightFormat::kBfloat16) {
      return kPart == 0 ? Simd::load_even_bfloat16(p) : Simd::load_odd_bfloat16(p);
    } else if constexpr (kFormat == WeightFormat::kFloat16) {
      return Simd::load_float16(p + kPart * Simd::kLanes * kBytes);
    } else {
      return input<kPart>(p);
    }
  }
  template <int kPart>
  static Vec input(const std::byte* p) {
    return Simd::load_float32(p + kPart * sizeof(Vec));
  }
  static Vec add(Vec sum, Vec w, Vec x) { return Simd::multiply_add(w, x, sum); }
  static void pack(const std::byte* p, std::byte* packed) {
    const Vec parts[kParts] = {weights<0>(p), weights<1>(p)};
    std::memcpy(packed, parts, sizeof(parts));
  }
  // Widening bfloat16 is cheapest when even and odd values part: inputs follow that order.
  static int64_t position(int64_t i) {
    return kFormat == WeightFormat::kBfloat16 ? i % 2 * Simd::kLanes + i / 2 : i;
  }
};

// Adds to sums[t][r] the products of one part of a step.
template <class Product, int kPart, int kRows, int kTokens>
inline void add_part(const std::byte* const (&rows)[kRows], int64_t row_offset,
                     const std::byte* const (&inputs)[kTokens], int64_t input_offset,
                     typename Product::Simd::Vec (&sums)[kTokens][kRows]) {
  // The smaller side stays in registers while the other passes by.
  if constexpr (kRows < kTokens) {
    decltype(Product::template weights<kPart>(nullptr)) w[kRows];
    for (int r = 0; r < kRows; ++r) w[r] = Product::template weights<kPart>(rows[r] + row_offset);
    for (int t = 0; t < kTokens; ++t) {
      const auto x = Product::template input<kPart>(inputs[t] + input_offset);
      for (int r = 0; r < kRows; ++r) sums[t][r] = Product::add(sums[t][r], w[r], x);
    }
  } else {
    decltype(Product::template input<kPart>(nullptr)) x[kTokens];
    for (int t = 0; t < kTokens; ++t)
      x[t] = Product::template input<kPart>(inputs[t] + input_offset);
    for (int r = 0; r < kRows; ++r) {
      const auto w = Product::template weights<kPart>(rows[r] + row_offset);
      for (int t = 0; t < kTokens; ++t) sums[t][r] = Product::add(sums[t][r], w, x[t]);
    }
  }
}

template <class Product, int kRows, int kTokens>
inline void add_step(const std::byte* const (&rows)[kRows], int64_t row_offset,
                     const std::byte* const (&inputs)[kTokens], int64_t input_offset,
                     typename Product::Simd::Vec (&sums)[kTokens][kRows]) {
  add_part<Product, 0>(rows, row_offset, inputs, input_offset, sums);
  if constexpr (Product::kParts == 2) {
    add_part<Product, 1>(rows, row_offset, inputs, input_offset, sums);
  }
}

// The tile: sums[t][r] = rows[r] . inputs[t], `size` values each. A function of its own: inlined,
// its sums would share registers with what surrounds it.
template <class Product, int kRows, int kTokens>
__attribute__((noinline)) void dots(const std::byte* const (&rows)[kRows],
                                    const std::byte* const (&inputs)[kTokens], int64_t size,
                                    float (&sums)[kTokens][kMaxRows]) {
  using Simd = typename Product::Simd;
  typename Simd::Vec lanes[kTokens][kRows];
  for (auto& token : lanes) {
    for (auto& row : token) row = Simd::zero();
  }
  const auto step = [&](int64_t at) __attribute__((always_inline)) {
    add_step<Product>(rows, at * Product::kBytes, inputs, at * Product::kInputBytes, lanes);
  };
  int64_t done = 0;
  constexpr int64_t kTurn = 2 * Product::kStep;  // so the compiler keeps operands in registers
  for (; done + kTurn <= size; done += kTurn) {
    if constexpr (Product::kAhead > 0) {
      for (int r = 0; r < kRows; ++r) {
        for (int64_t line = 0; line < kTurn * Product::kBytes; line += 64) {
          __builtin_prefetch(rows[r] + done * Product::kBytes + line + Product::kAhead);
        }
      }
    }
    step(done);
    step(done + Product::kStep);
  }
  for (; done + Product::kStep <= size; done += Product::kStep) step(done);
  if (done < size) {  // nothing past a row's end may be read
    std::byte padded[kRows][Product::kStep * Product::kBytes] = {};
    const std::byte* ends[kRows];
    for (int r = 0; r < kRows; ++r) {
      std::memcpy(padded[r], rows[r] + done * Product::kBytes, (size - done) * Product::kBytes);
      ends[r] = padded[r];
    }
    add_step<Product>(ends, 0, inputs, done * Product::kInputBytes, lanes);
  }
  for (int t = 0; t < kTokens; ++t) {
    Simd::sum_lanes(lanes[t][0], kRows > 1 ? lanes[t][1] : Simd::zero(),
                    kRows > 2 ? lanes[t][2] : Simd::zero(), kRows > 3 ? lanes[t][3] : Simd::zero(),
                    sums[t]);
  }
}

// Tiles for all tokens, at most kTokens each: calls use(token, sums of its rows).
template <class Product, int kTokens, int kRows, class Input, class Use>
inline void for_tokens(const std::byte* const (&rows)[kRows], int64_t size, int64_t first,
                       int64_t tokens, const Input& input, const Use& use) {
  for (; first + kTokens <= tokens; first += kTokens) {
    const std::byte* inputs[kTokens];
    for (int t = 0; t < kTokens; ++t) inputs[t] = input(first + t);
    float sums[kTokens][kMaxRows];
    dots<Product>(rows, inputs, size, sums);
    for (int t = 0; t < kTokens; ++t) use(first + t, sums[t]);
  }
  if constexpr (kTokens > 1)
    for_tokens<Product, kTokens - 1>(rows, size, first, tokens, input, use);
}

// For each tile of the rows [first, last) of a matrix: use(rows' numbers, how many count,
// pointers). A tile's rows come from kRows places, each read from its start to its end. Rows side
// by side, as four of 1 kB in one page of memory, come at half the rate.
template <int kRows, class Use>
inline void for_row_tiles(int64_t first, int64_t last, const Use& use) {
  const int64_t part = (last - first + kRows - 1) / kRows;
  for (int64_t step = 0; step < part; ++step) {
    int64_t numbers[kRows];
    int valid = 0;
    for (int r = 0; r < kRows; ++r) {
      const int64_t number = first + r * part + step;
      if (number < last) ++valid;
      numbers[r] = smaller(number, last - 1);  // a row too many is computed and not used
    }
    use(numbers, valid);
  }
}

template <class First, class Second>
struct Ffn {
  using Simd = typename First::Simd;

  static size_t input_bytes(int64_t D) { return round_up(D, First::kStep) * First::kInputBytes; }

  static int64_t hidden_floats(int64_t F) { return round_up(F, Second::kStep); }

  static void pack(const std::byte* row, int64_t D, std::byte* packed) {
    int64_t done = 0;
    for (; done + First::kStep <= D; done += First::kStep) {
      First::pack(row + done * First::kBytes, packed + done * First::kInputBytes);
    }
    if (done < D) {
      std::byte padded[First::kStep * First::kBytes] = {};
      std::memcpy(padded, row + done * First::kBytes, (D - done) * First::kBytes);
      First::pack(padded, packed + done * First::kInputBytes);
    }
  }

  static void gate_up(const GateUpRows& work) {
    if (work.tokens <= Simd::kFewTokens) {
      gate_up_tiles<kMaxRows, Simd::kFewTokens>(work);
    } else {
      gate_up_tiles<Simd::kManyRows, Simd::kManyTokens>(work);
    }
  }

  static bool down(const DownRows& work) {
    return work.tokens <= Simd::kFewTokens ? down_tiles<kMaxRows, Simd::kFewTokens>(work)
                                           : down_tiles<Simd::kManyRows, Simd::kManyTokens>(work);
  }

  static constexpr FfnKernel kKernel = {input_bytes, pack, hidden_floats, gate_up, down};

 private:
  static int64_t position(int64_t f) {
    return f / Second::kStep * Second::kStep + Second::position(f % Second::kStep);
  }

  // silu(gate) * up. Overflow of the exponential is exact: it gives 0.
  static float activation(float gate, float up) {
    return gate / (1.0f + __builtin_expf(-gate)) * up;
  }

  template <int kRows, int kTokens>
  static void gate_up_tiles(const GateUpRows& work) {
    const int64_t row_bytes = work.D * First::kBytes, width = hidden_floats(work.F);
    const auto input = [&](int64_t t) { return work.inputs[t]; };
    const auto project = [&](const std::byte* matrix, const auto& use) {
      for_row_tiles<kRows>(work.first, work.last, [&](const int64_t (&f)[kRows], int valid) {
        const std::byte* rows[kRows];
        for (int r = 0; r < kRows; ++r) rows[r] = matrix + f[r] * row_bytes;
        for_tokens<First, kTokens>(rows, work.D, 0, work.tokens, input,
                                   [&](int64_t t, const float (&sums)[kMaxRows]) {
                                     for (int r = 0; r < valid; ++r)
                                       use(work.hidden[t * width + position(f[r])], sums[r]);
                                   });
      });
    };
    project(work.gate_up, [](float& hidden, float gate) { hidden = gate; });
    project(work.gate_up + work.F * row_bytes,
            [](float& hidden, float up) { hidden = activation(hidden, up); });
    if (work.last == work.F) {
      for (int64_t t = 0; t < work.tokens; ++t) {
        for (int64_t f = work.F; f < width; ++f) work.hidden[t * width + position(f)] = 0;
      }
    }
  }

  template <int kRows, int kTokens>
  static bool down_tiles(const DownRows& work) {
    const int64_t row_bytes = work.F * Second::kBytes, width = hidden_floats(work.F);
    const auto input = [&](int64_t t) {
      return reinterpret_cast<const std::byte*>(work.hidden + t * width);
    };
    bool finite = true;
    for_row_tiles<kRows>(work.first, work.last, [&](const int64_t (&d)[kRows], int valid) {
      const std::byte* rows[kRows];
      for (int r = 0; r < kRows; ++r) rows[r] = work.down + d[r] * row_bytes;
      const auto add = [&](int64_t t, const float (&sums)[kMaxRows]) {
        for (int r = 0; r < valid; ++r) {
          const float value = work.gates[t] * sums[r];
          finite &= __builtin_fabsf(value) <= FLT_MAX;
          work.outputs[t][d[r]] += value;
        }
      };
      for_tokens<Second, kTokens>(rows, work.F, 0, work.tokens, input, add);
    });
    return finite;
  }
};

template <class Simd, WeightFormat kFormat>
using WidenedFfn = Ffn<Widened<Simd, kFormat>, Widened<Simd, kFormat>>;

template <class Simd>
const FfnKernel& widened_kernel(WeightFormat format) {
  switch (format) {
    case WeightFormat::kBfloat16:
      return WidenedFfn<Simd, WeightFormat::kBfloat16>::kKernel;
    case WeightFormat::kFloat16:
      return WidenedFfn<Simd, WeightFormat::kFloat16>::kKernel;
    case WeightFormat::kFloat32:
      break;
  }
  return WidenedFfn<Simd, WeightFormat::kFloat32>::kKernel;
}

}  // namespace
}  // namespace oled_jax
