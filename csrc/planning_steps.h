// The steps of planning a layer, for those who take several of them in one call. See planning.h.

#pragma once

#include <cstdint>

#include "planning_arrays.h"

namespace oled_jax {

struct Activated {
  int64_t hits, misses;
};

// Microseconds, as in oled_jax/cost/profile.py.
struct SplitCosts {
  double h2d_us, cpu_fixed_us, cpu_token_us;
};

struct Moved {
  int64_t fault;  // of Residency.exchange; then nothing has moved
  int64_t rounds, num_free;
};

void unpack(const NumpyView<const int32_t, 2>& packed, const Flags& token_mask,
            const NumpyView<int32_t, 2>& expert_ids, const NumpyView<float, 2>& gates,
            const NumpyView<int64_t>& loads);
// experts: [experts], gets the hits, then the misses.
Activated activate(int64_t layer, int64_t pass_number, const Numbers& loads,
                   const NumpyView<const int32_t, 2>& slot, const NumpyView<int64_t, 2>& last_use,
                   const NumpyView<bool>& resident, int64_t* experts);
void score_layer(int64_t layer, const NumpyView<const int32_t, 2>& expert_ids,
                 const NumpyView<const float, 2>& gates, const Reals& weights,
                 const NumpyView<int32_t, 3>& kept_ids, const NumpyView<float, 3>& kept_gates,
                 const NumpyView<double, 2>& scores);
// ranked: [misses], gets those to transfer first. Returns their number.
int64_t balance(const Numbers& misses, const Numbers& loads, const Reals& scores,
                const SplitCosts& costs, double reuse_scale, int64_t swaps, int64_t* ranked);
// chosen: [experts].
void choose_residents(const Flags& resident, const Numbers& entering, const Reals& scores,
                      const Numbers& last_use, int64_t count, bool* chosen);
// slots: [hits + to_gpu].
Moved move_pages(int64_t layer, int64_t num_free, const Numbers& hits, const Numbers& misses,
                 const Numbers& to_gpu, const Numbers& to_cpu, const Flags& keep, int64_t most,
                 const NumpyView<int32_t, 2>& table, const NumpyView<int32_t>& free,
                 const NumpyView<int32_t>& ends, int32_t* slots);
void write_layer(const NumpyView<const int32_t, 2>& expert_ids, const Flags& token_mask,
                 const Numbers& hits, const Numbers& to_gpu, const NumpyView<const int32_t>& slots,
                 const NumpyView<const int32_t>& ends, int64_t rows,
                 const NumpyView<const int64_t, 2>& bounds, const NumpyView<int32_t>& plan);

}  // namespace oled_jax
