#include "planning.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "planning_steps.h"

namespace nb = nanobind;

namespace oled_jax {
namespace {

void require_experts(const Numbers& experts, int64_t E) {
  for (int64_t expert : experts) require(0 <= expert && expert < E, "there is no such expert");
}

// Greatest first, NaN last, as NumPy sorts -a.
bool greater(double a, double b) { return a > b || (std::isnan(b) && !std::isnan(a)); }

// Least first, NaN last, as NumPy sorts.
bool less(double a, double b) { return a < b || (std::isnan(b) && !std::isnan(a)); }

// Adds a token's experts to the tokens per expert.
void count_token(const int32_t* ids, int64_t K, int64_t* loads, int64_t E) {
  for (int64_t k = 0; k < K; ++k) {
    require(0 <= ids[k] && ids[k] < E, "there is no such expert");
    ++loads[ids[k]];
  }
}

}  // namespace

void unpack(const NumpyView<const int32_t, 2>& packed, const Flags& token_mask,
            const NumpyView<int32_t, 2>& expert_ids, const NumpyView<float, 2>& gates,
            const NumpyView<int64_t>& loads) {
  const int64_t N = packed.shape(0), K = packed.shape(1) / 2, E = loads.size();
  require(token_mask.size() == N && expert_ids.shape(0) == N && gates.shape(0) == N,
          "arrays of different numbers of tokens");
  require(packed.shape(1) == 2 * K && expert_ids.shape(1) == K && gates.shape(1) == K,
          "arrays of different numbers of experts per token");
  std::fill(loads.begin(), loads.end(), 0);
  for (int64_t n = 0; n < N; ++n) {
    const int32_t* ids = packed.row(n);
    std::memcpy(expert_ids.row(n), ids, K * sizeof(int32_t));
    std::memcpy(gates.row(n), ids + K, K * sizeof(float));
    if (token_mask[n]) count_token(ids, K, loads.begin(), E);
  }
}

namespace {

void count_loads(const NumpyView<const int32_t, 3>& expert_ids, const Flags& token_mask,
                 const NumpyView<int64_t, 2>& loads) {
  const int64_t L = expert_ids.shape(0), N = expert_ids.shape(1), K = expert_ids.shape(2);
  require(token_mask.size() == N, "arrays of different numbers of tokens");
  require(loads.shape(0) == L, "one row of loads per layer");
  for (int64_t layer = 0; layer < L; ++layer) {
    int64_t* row = loads.row(layer);
    std::fill(row, row + loads.shape(1), 0);
    for (int64_t n = 0; n < N; ++n) {
      if (token_mask[n]) count_token(expert_ids.row(layer) + n * K, K, row, loads.shape(1));
    }
  }
}

}  // namespace

Activated activate(int64_t layer, int64_t pass_number, const Numbers& loads,
                   const NumpyView<const int32_t, 2>& slot, const NumpyView<int64_t, 2>& last_use,
                   const NumpyView<bool>& resident, int64_t* experts) {
  const int64_t E = loads.size();
  require(resident.size() == E, "arrays of different numbers of experts");
  require(slot.shape(1) == E && last_use.shape(1) == E, "tables of another number of experts");
  require(0 <= layer && layer < std::min(slot.shape(0), last_use.shape(0)), "no such layer");
  const int32_t* slots = slot.row(layer);
  int64_t* used = last_use.row(layer);
  int64_t hits = 0, activated = 0;
  for (int64_t e = 0; e < E; ++e) {
    resident[e] = slots[e] >= 0;
    if (loads[e] <= 0) continue;
    used[e] = pass_number;
    hits += resident[e];
    ++activated;
  }
  int64_t hit = 0, miss = hits;
  for (int64_t e = 0; e < E; ++e) {
    if (loads[e] > 0) experts[resident[e] ? hit++ : miss++] = e;
  }
  return {hits, activated - hits};
}

namespace {

nb::tuple split_activated(int64_t layer, int64_t pass_number, const Numbers& loads,
                          const NumpyView<const int32_t, 2>& slot,
                          const NumpyView<int64_t, 2>& last_use, const NumpyView<bool>& resident) {
  std::vector<int64_t> experts(loads.size());
  const Activated found =
      activate(layer, pass_number, loads, slot, last_use, resident, experts.data());
  return nb::make_tuple(new_array(experts.data(), found.hits),
                        new_array(experts.data() + found.hits, found.misses));
}

nb::tuple unpack_activated(int64_t layer, int64_t pass_number,
                           const NumpyView<const int32_t, 2>& packed, const Flags& token_mask,
                           const NumpyView<int32_t, 2>& expert_ids,
                           const NumpyView<float, 2>& gates, const NumpyView<int64_t>& loads,
                           const NumpyView<const int32_t, 2>& slot,
                           const NumpyView<int64_t, 2>& last_use, const NumpyView<bool>& resident) {
  unpack(packed, token_mask, expert_ids, gates, loads);
  return split_activated(layer, pass_number, loads, slot, last_use, resident);
}

// Priorities of one layer: N * K ids and gates, E scores.
void score(const int32_t* ids, const float* gates, const Reals& weights, int64_t K, double* scores,
           int64_t E) {
  std::fill(scores, scores + E, 0.0);
  for (double weight : weights) {
    for (int64_t k = 0; k < K; ++k, ++ids, ++gates) {
      require(0 <= *ids && *ids < E, "there is no such expert");
      scores[*ids] += static_cast<double>(*gates) * weight;
    }
  }
  double total = 0.0;
  for (int64_t e = 0; e < E; ++e) total += scores[e];
  if (total > 0.0) {
    for (int64_t e = 0; e < E; ++e) scores[e] /= total;
  }
}

template <class Ids, class Gates>
void require_routes(const Ids& expert_ids, const Gates& gates, const Reals& weights) {
  for (int axis = 0; axis < 3; ++axis) {
    require(expert_ids.shape(axis) == gates.shape(axis), "one gate per pair");
  }
  require(weights.size() == expert_ids.shape(1), "one weight per token");
}

}  // namespace

void score_layer(int64_t layer, const NumpyView<const int32_t, 2>& expert_ids,
                 const NumpyView<const float, 2>& gates, const Reals& weights,
                 const NumpyView<int32_t, 3>& kept_ids, const NumpyView<float, 3>& kept_gates,
                 const NumpyView<double, 2>& scores) {
  require_routes(kept_ids, kept_gates, weights);
  const int64_t N = expert_ids.shape(0), K = expert_ids.shape(1);
  require(kept_ids.shape(1) == N && kept_ids.shape(2) == K, "other routes than those to keep");
  require(gates.shape(0) == N && gates.shape(1) == K, "one gate per pair");
  require(0 <= layer && layer < std::min(kept_ids.shape(0), scores.shape(0)), "no such layer");
  for (int64_t n = 0; n < N; ++n) {
    std::copy_n(expert_ids.row(n), K, kept_ids.row(layer) + n * K);
    std::copy_n(gates.row(n), K, kept_gates.row(layer) + n * K);
  }
  score(kept_ids.row(layer), kept_gates.row(layer), weights, K, scores.row(layer), scores.shape(1));
}

namespace {

void score_layers(const NumpyView<const int32_t, 3>& expert_ids,
                  const NumpyView<const float, 3>& gates, const Reals& weights,
                  const NumpyView<double, 2>& scores) {
  require_routes(expert_ids, gates, weights);
  require(scores.shape(0) == expert_ids.shape(0), "one row of scores per layer");
  for (int64_t layer = 0; layer < scores.shape(0); ++layer) {
    score(expert_ids.row(layer), gates.row(layer), weights, expert_ids.shape(2), scores.row(layer),
          scores.shape(1));
  }
}

struct Miss {
  int64_t expert;
  double score, cpu, reuse;

  double gain() const { return cpu + reuse; }
};

// Positions in misses[begin, end) of the `count` first by `precedes`, equals in their order.
template <class Precedes>
std::vector<int64_t> first_of(const std::vector<Miss>& misses, int64_t begin, int64_t end,
                              int64_t count, Precedes precedes) {
  std::vector<int64_t> order(end - begin);
  for (int64_t i = begin; i < end; ++i) order[i - begin] = i;
  const auto earlier = [&](int64_t i, int64_t j) {
    const double a = misses[i].gain(), b = misses[j].gain();
    return precedes(a, b) || (!precedes(b, a) && i < j);
  };
  std::partial_sort(order.begin(), order.begin() + count, order.end(), earlier);
  order.resize(count);
  return order;
}

void exchange(std::vector<Miss>& misses, int64_t count, double h2d_us, int64_t swaps) {
  const int64_t M = misses.size();
  const double transfer_us = static_cast<double>(count) * h2d_us;
  double cpu_us = 0.0;
  for (int64_t i = count; i < M; ++i) cpu_us += misses[i].cpu;
  if (cpu_us <= transfer_us) return;
  swaps = std::min({swaps, count, M - count});
  const std::vector<int64_t> leaving = first_of(misses, 0, count, swaps, less);
  const std::vector<int64_t> entering = first_of(misses, count, M, swaps, greater);
  double cpu_change = 0.0, reuse_change = 0.0, value = cpu_us;
  for (int64_t i = 0; i < swaps; ++i) {
    Miss& out = misses[leaving[i]];
    Miss& into = misses[entering[i]];
    cpu_change += out.cpu - into.cpu;
    reuse_change += out.reuse - into.reuse;
    const double tried = std::max(cpu_us + cpu_change, transfer_us) + reuse_change;
    if (!(tried < value - 1e-9 * cpu_us)) return;
    value = tried;
    std::swap(out, into);
  }
}

}  // namespace

int64_t balance(const Numbers& misses, const Numbers& loads, const Reals& scores,
                const SplitCosts& costs, double reuse_scale, int64_t swaps, int64_t* ranked) {
  const int64_t M = misses.size();
  require_experts(misses, std::min(loads.size(), scores.size()));
  std::vector<Miss> sorted(M);
  double cpu_us = 0.0;
  for (int64_t i = 0; i < M; ++i) {
    const int64_t e = misses[i];
    const double cpu = costs.cpu_fixed_us + costs.cpu_token_us * static_cast<double>(loads[e]);
    sorted[i] = {e, scores[e], cpu, reuse_scale * scores[e]};
    cpu_us += cpu;
  }
  const double mean = cpu_us / static_cast<double>(M);
  const double share = static_cast<double>(M) * mean / (mean + costs.h2d_us) + 0.5;
  const int64_t count = share < static_cast<double>(M) ? static_cast<int64_t>(share) : M;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Miss& a, const Miss& b) { return greater(a.score, b.score); });
  if (0 < count && count < M) exchange(sorted, count, costs.h2d_us, swaps);
  for (int64_t i = 0; i < M; ++i) ranked[i] = sorted[i].expert;
  return count;
}

namespace {

nb::tuple split_balanced(const Numbers& misses, const Numbers& loads, const Reals& scores,
                         double h2d_us, double cpu_fixed_us, double cpu_token_us,
                         double reuse_scale, int64_t swaps) {
  std::vector<int64_t> ranked(misses.size());
  const SplitCosts costs{h2d_us, cpu_fixed_us, cpu_token_us};
  const int64_t count = balance(misses, loads, scores, costs, reuse_scale, swaps, ranked.data());
  return nb::make_tuple(new_array(ranked.data(), count),
                        new_array(ranked.data() + count, misses.size() - count));
}

nb::tuple scan_paths(double h2d_us, const Reals& cpu, const Reals& reuse,
                     const NumpyView<bool>& chosen) {
  const int64_t M = cpu.size();
  require(M > 0 && reuse.size() == M && chosen.size() == M,
          "arrays of different numbers of misses");
  std::vector<int64_t> order(M), best;
  std::vector<double> key(M), cpu_us(M + 1), bounds(M + 1);
  double value = 0.0;
  for (int path = 0; path < 2; ++path) {
    for (int64_t i = 0; i < M; ++i) {
      order[i] = i;
      key[i] = path == 0 ? reuse[i] : cpu[i] + reuse[i];
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t i, int64_t j) { return greater(key[i], key[j]); });
    for (int64_t g = M; g-- > 0;) cpu_us[g] = cpu_us[g + 1] + cpu[order[g]];
    double taken = 0.0;
    for (int64_t g = 0; g <= M; ++g) {
      const double transfer_us = static_cast<double>(g) * h2d_us;
      const double tried = std::max(transfer_us, cpu_us[g]) - taken;
      if ((path == 0 && g == 0) || tried < value) {
        value = tried;
        best.assign(order.begin(), order.begin() + g);
      }
      const double bound = (path == 0 ? transfer_us : cpu_us[g]) - taken;
      bounds[g] = path == 0 ? bound : std::max(bounds[g], bound);
      if (g < M) taken += reuse[order[g]];
    }
  }
  std::fill(chosen.begin(), chosen.end(), false);
  for (int64_t i : best) chosen[i] = true;
  return nb::make_tuple(value, *std::min_element(bounds.begin(), bounds.end()));
}

}  // namespace

void choose_residents(const Flags& resident, const Numbers& entering, const Reals& scores,
                      const Numbers& last_use, int64_t count, bool* chosen) {
  const int64_t E = resident.size();
  require(scores.size() == E && last_use.size() == E, "arrays of different numbers of experts");
  require_experts(entering, E);
  std::copy(resident.begin(), resident.end(), chosen);
  for (int64_t e : entering) chosen[e] = true;
  struct Candidate {
    double score;
    int64_t last_use, expert;
  };
  std::vector<Candidate> candidates;
  candidates.reserve(E);
  for (int64_t e = 0; e < E; ++e) {
    if (chosen[e]) candidates.push_back({scores[e], last_use[e], e});
  }
  if (static_cast<int64_t>(candidates.size()) <= count) return;
  const auto best = candidates.begin() + std::max<int64_t>(count, 0);
  std::nth_element(candidates.begin(), best, candidates.end(),
                   [](const Candidate& a, const Candidate& b) {
                     if (greater(a.score, b.score)) return true;
                     if (greater(b.score, a.score)) return false;
                     if (a.last_use != b.last_use) return a.last_use > b.last_use;
                     return a.expert < b.expert;
                   });
  for (auto dropped = best; dropped != candidates.end(); ++dropped) chosen[dropped->expert] = false;
}

namespace {

nb::object best_residents(const Flags& resident, const Numbers& entering, const Reals& scores,
                          const Numbers& last_use, int64_t count) {
  NewArray<bool> chosen(resident.size());
  choose_residents(resident, entering, scores, last_use, count, chosen.begin());
  return chosen.object();
}

// As in oled_jax/offload/residency.py.
enum Fault : int64_t { kNoFault, kNotTheMisses, kKeepsAbsent, kKeepsTooMany };

// slots: the layer's row of the slot table.
int64_t find_fault(const Numbers& misses, const Numbers& to_gpu, const Numbers& to_cpu,
                   const int32_t* slots, const Flags& keep, int64_t most) {
  const int64_t E = keep.size();
  require_experts(misses, E);
  enum : char { kNothing, kMissed, kMoved, kComputed };
  std::vector<char> state(E, kNothing);
  for (int64_t e : misses) state[e] = kMissed;
  if (to_gpu.size() + to_cpu.size() != misses.size()) return kNotTheMisses;
  for (int64_t e : to_gpu) {
    if (e < 0 || e >= E || state[e] != kMissed) return kNotTheMisses;
    state[e] = kMoved;
  }
  for (int64_t e : to_cpu) {
    if (e < 0 || e >= E || state[e] != kMissed) return kNotTheMisses;
    state[e] = kComputed;
  }
  int64_t kept = 0;
  for (int64_t e = 0; e < E; ++e) {
    if (keep[e] && slots[e] < 0 && state[e] != kMoved) return kKeepsAbsent;
    kept += keep[e];
  }
  return kept > most ? kKeepsTooMany : kNoFault;
}

int64_t exchange_arrivals(int64_t layer, const Numbers& hits, const Numbers& to_gpu,
                          const Flags& keep, const NumpyView<bool, 2>& arrived) {
  const int64_t E = arrived.shape(1);
  require(keep.size() == E, "keep has another number of experts");
  require(0 <= layer && layer < arrived.shape(0), "no such layer");
  require_experts(hits, E);
  require_experts(to_gpu, E);
  bool* row = arrived.row(layer);
  int64_t used = 0;
  for (int64_t e : hits) used += row[e];
  std::fill(row, row + E, false);
  for (int64_t e : to_gpu) row[e] = keep[e];
  return used;
}

// A layer's row of the slot table and the stack of free slots, see oled_jax/offload/residency.py.
struct Slots {
  int32_t* row;
  const NumpyView<int32_t>& free;
  int64_t num_free;

  // What a round frees waits for one round more, so that the next one's pages can move meanwhile.
  std::vector<int32_t> waiting = {};

  void drop(int64_t expert) {
    if (row[expert] < 0) throw std::runtime_error("a page that is not resident cannot leave");
    waiting.push_back(row[expert]);
    row[expert] = -1;
  }

  void release() {
    require(num_free + static_cast<int64_t>(waiting.size()) <= free.size(), "a slot was freed twice");
    for (int32_t slot : waiting) free[num_free++] = slot;
    waiting.clear();
  }
};

}  // namespace

Moved move_pages(int64_t layer, int64_t num_free, const Numbers& hits, const Numbers& misses,
                 const Numbers& to_gpu, const Numbers& to_cpu, const Flags& keep, int64_t most,
                 const NumpyView<int32_t, 2>& table, const NumpyView<int32_t>& free,
                 const NumpyView<int32_t>& ends, int32_t* slots) {
  const int64_t E = table.shape(1), G = to_gpu.size(), H = hits.size();
  require(0 <= layer && layer < table.shape(0), "no such layer");
  require(0 <= num_free && num_free <= free.size(), "more slots are free than there are");
  require(keep.size() == E && ends.size() >= std::max<int64_t>(G, 1), "arrays of other sizes");
  require_experts(hits, E);
  if (int64_t fault = find_fault(misses, to_gpu, to_cpu, table.row(layer), keep, most)) {
    return {fault, 0, num_free};
  }
  Slots pool{table.row(layer), free, num_free};
  for (int64_t i = 0; i < H; ++i) slots[i] = pool.row[hits[i]];
  std::vector<int64_t> leaving;
  for (int64_t e = 0; e < E; ++e) {
    if (pool.row[e] >= 0 && !keep[e]) leaving.push_back(e);
  }
  const bool several = G > pool.num_free;
  int64_t done = 0, rounds = 0;
  do {
    if (pool.num_free == 0) pool.release();
    // A round leaves half of the free slots to the next one.
    const int64_t half = (pool.num_free + static_cast<int64_t>(pool.waiting.size()) + 1) / 2;
    const int64_t taken = several ? std::min(pool.num_free, half) : pool.num_free;
    const int64_t end = std::min(G, done + taken);
    if (end == done && done < G) throw std::runtime_error("no slot is free");
    pool.num_free -= end - done;
    for (int64_t i = done; i < end; ++i) {
      const int64_t e = to_gpu[i];
      if (pool.row[e] >= 0) throw std::runtime_error("a resident page cannot enter again");
      pool.row[e] = slots[H + i] = free[pool.num_free + i - done];
    }
    pool.release();
    if (rounds == 0) {
      for (int64_t e : leaving) pool.drop(e);
    }
    for (int64_t i = done; i < end; ++i) {
      if (!keep[to_gpu[i]]) pool.drop(to_gpu[i]);
    }
    ends[rounds++] = static_cast<int32_t>(end);
    done = end;
  } while (done < G);
  pool.release();
  return {kNoFault, rounds, pool.num_free};
}

namespace {

nb::tuple exchange_pages(int64_t layer, int64_t num_free, const Numbers& hits,
                         const Numbers& misses, const Numbers& to_gpu, const Numbers& to_cpu,
                         const Flags& keep, int64_t most, const NumpyView<int32_t, 2>& table,
                         const NumpyView<int32_t>& free, const NumpyView<int32_t>& ends) {
  std::vector<int32_t> slots(hits.size() + to_gpu.size());
  const Moved moved = move_pages(layer, num_free, hits, misses, to_gpu, to_cpu, keep, most, table,
                                 free, ends, slots.data());
  const int64_t given = moved.fault ? 0 : static_cast<int64_t>(slots.size());
  return nb::make_tuple(moved.fault, moved.rounds, moved.num_free, new_array(slots.data(), given));
}

// The order of WRITTEN in oled_jax/offload/plan.py.
enum Field {
  kNumRounds,
  kCpuPairs,
  kHitEnd,
  kPrefetchCount,
  kEarlyRounds,
  kLateItems,
  kTransferEnd,
  kItemEnd,
  kTransferExpert,
  kTransferSlot,
  kItemSlot,
  kPairRow,
  kFields
};

}  // namespace

void write_layer(const NumpyView<const int32_t, 2>& expert_ids, const Flags& token_mask,
                 const Numbers& hits, const Numbers& to_gpu, const NumpyView<const int32_t>& slots,
                 const NumpyView<const int32_t>& ends, int64_t rows,
                 const NumpyView<const int64_t, 2>& bounds, const NumpyView<int32_t>& plan) {
  const int64_t N = expert_ids.shape(0), K = expert_ids.shape(1);
  const int64_t H = hits.size(), G = to_gpu.size(), S = H + G, R = ends.size();
  require(token_mask.size() == N && slots.size() == S && R > 0 && rows > 0,
          "arrays of other sizes");
  require(bounds.shape(0) == kFields && bounds.shape(1) == 2, "bounds of other fields");
  const auto field = [&](Field name, int64_t length) {
    const int64_t* bound = bounds.row(name);
    require(0 <= bound[0] && bound[0] + length <= bound[1] && bound[1] <= plan.size(),
            "a field is too short");
    return plan.begin() + bound[0];
  };
  const auto length = [&](Field name) { return bounds.row(name)[1] - bounds.row(name)[0]; };
  const int64_t E = length(kTransferExpert);
  require_experts(hits, E);
  require_experts(to_gpu, E);

  // Keys number the experts in the order in which they are computed; S: by nobody on the device.
  std::vector<int32_t> key(E, static_cast<int32_t>(S)), count(S + 1), item(S + 1);
  for (int64_t i = 0; i < H; ++i) key[hits[i]] = static_cast<int32_t>(i);
  for (int64_t i = 0; i < G; ++i) key[to_gpu[i]] = static_cast<int32_t>(H + i);
  for (int64_t n = 0; n < N; ++n) {
    if (!token_mask[n]) continue;
    for (int64_t k = 0; k < K; ++k) {
      const int32_t expert = expert_ids.row(n)[k];
      require(0 <= expert && expert < E, "there is no such expert");
      ++count[key[expert]];
    }
  }
  // Where an item holds every token of the pass, a token's row is its number.
  const bool direct = rows == N;
  for (int64_t i = 0; i < S; ++i) {
    const int64_t needed = direct ? count[i] > 0 : (count[i] + rows - 1) / rows;
    item[i + 1] = static_cast<int32_t>(item[i] + needed);
  }
  int32_t* item_slot = field(kItemSlot, item[S]);
  for (int64_t i = 0; i < S; ++i) std::fill(item_slot + item[i], item_slot + item[i + 1], slots[i]);
  int32_t* pair_row = field(kPairRow, N * K);
  std::vector<int32_t> seen(S);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t k = 0; k < K; ++k) {
      const int32_t i = token_mask[n] ? key[expert_ids.row(n)[k]] : static_cast<int32_t>(S);
      *pair_row++ = i == S ? -1 : static_cast<int32_t>(item[i] * rows + (direct ? n : seen[i]++));
    }
  }
  int32_t* experts = field(kTransferExpert, G);
  std::copy(to_gpu.begin(), to_gpu.end(), experts);
  std::copy(slots.begin() + H, slots.end(), field(kTransferSlot, G));
  int32_t* transfer_end = field(kTransferEnd, R);
  int32_t* item_end = field(kItemEnd, R);
  std::fill(transfer_end, transfer_end + length(kTransferEnd), static_cast<int32_t>(G));
  std::fill(item_end, item_end + length(kItemEnd), item[S]);
  for (int64_t r = 0; r < R; ++r) {
    require(0 <= ends[r] && ends[r] <= G, "a round ends after the last transfer");
    transfer_end[r] = ends[r];
    item_end[r] = item[H + ends[r]];
  }
  *field(kNumRounds, 1) = static_cast<int32_t>(R);
  *field(kCpuPairs, 1) = count[S];
  *field(kHitEnd, 1) = item[H];
  *field(kPrefetchCount, 1) = 0;
  *field(kEarlyRounds, 1) = static_cast<int32_t>(R - 1);
  int32_t* late_items = field(kLateItems, 3);
  late_items[0] = R > 1 ? item_end[R - 2] : 0;
  late_items[1] = R > 1 ? item_end[R - 2] : item[H];
  late_items[2] = item[S];
}

namespace {

// items: an ItemShape.
void write_items(const NumpyView<const int32_t, 2>& expert_ids, const Flags& token_mask,
                 const Numbers& hits, const Numbers& to_gpu, const NumpyView<const int32_t>& slots,
                 const NumpyView<const int32_t>& ends, nb::handle items,
                 const NumpyView<const int64_t, 2>& bounds, const NumpyView<int32_t>& plan) {
  const auto rows = nb::cast<int64_t>(items.attr("rows"));
  write_layer(expert_ids, token_mask, hits, to_gpu, slots, ends, rows, bounds, plan);
}

}  // namespace

void bind_planning(nb::module_& module) {
  nb::module_ planning = module.def_submodule("planning", "NumPy functions of oled_jax, compiled.");
  planning.def("count_loads", &count_loads);
  planning.def("split_activated", &split_activated);
  planning.def("unpack_activated", &unpack_activated);
  planning.def("score_layer", &score_layer);
  planning.def("score_layers", &score_layers);
  planning.def("split_balanced", &split_balanced);
  planning.def("scan_paths", &scan_paths);
  planning.def("best_residents", &best_residents);
  planning.def("exchange_arrivals", &exchange_arrivals);
  planning.def("move_pages", &exchange_pages);
  planning.def("write_layer", &write_items);
  bind_reuse(planning);
  bind_layer_planner(planning);
}

}  // namespace oled_jax
