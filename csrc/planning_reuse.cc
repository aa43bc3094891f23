// What `oled+` expects of experts: policies/reuse.py, lasting.py and marginal.py.

#include <algorithm>
#include <cmath>
#include <vector>

#include "planning.h"
#include "planning_arrays.h"

namespace nb = nanobind;

namespace oled_jax {
namespace {

void score_reuse(int64_t layer, const NumpyView<const int32_t, 2>& expert_ids, const Numbers& loads,
                 const NumpyView<const double, 3>& absent, const NumpyView<const double, 2>& opening,
                 double opening_share, const NumpyView<const double, 2>& active,
                 const NumpyView<const double, 2>& idle, double lasting_share, bool as_shares,
                 const NumpyView<int32_t, 3>& kept_ids, const NumpyView<bool, 2>& activated,
                 const NumpyView<double, 2>& scores) {
  const int64_t N = expert_ids.shape(0), K = expert_ids.shape(1), E = loads.size();
  for (const auto* table : {&opening, &active, &idle}) {
    require(0 <= layer && layer < table->shape(0) && table->shape(1) == E, "no such layer");
  }
  require(layer < std::min({absent.shape(0), kept_ids.shape(0), activated.shape(0), scores.shape(0)}),
          "no such layer");
  require(activated.shape(1) == E && scores.shape(1) == E, "tables of another number of experts");
  require(absent.shape(1) == N && absent.shape(2) == K, "one chance per pair");
  require(kept_ids.shape(1) == N && kept_ids.shape(2) == K, "other routes than those to keep");
  double* row = scores.row(layer);
  std::fill(row, row + E, 1.0);  // first the chance that nobody uses an expert
  for (int64_t n = 0; n < N; ++n) {
    const int32_t* ids = expert_ids.row(n);
    const double* chances = absent.row(layer) + n * K;
    std::copy_n(ids, K, kept_ids.row(layer) + n * K);
    for (int64_t k = 0; k < K; ++k) {
      require(0 <= ids[k] && ids[k] < E, "there is no such expert");
      row[ids[k]] *= chances[k];
    }
  }
  bool* used = activated.row(layer);
  double total = 0.0;
  for (int64_t e = 0; e < E; ++e) {
    used[e] = loads[e] > 0;
    double likely = 1.0 - row[e];
    if (opening_share > 0.0) {
      likely = (1.0 - opening_share) * likely + opening_share * opening.row(layer)[e];
    }
    row[e] = lasting_share * (used[e] ? active : idle).row(layer)[e] + likely;
    if (used[e]) total += row[e];
  }
  if (as_shares && total > 0.0) {
    for (int64_t e = 0; e < E; ++e) row[e] /= total;
  }
}

// Which group an expert's age and rate are in, by two tables.
struct AgeAndRate {
  const Numbers &group_of_age, &group_of_rate;

  AgeAndRate(const Numbers& ages, const Numbers& rates) : group_of_age(ages), group_of_rate(rates) {
    for (const Numbers* table : {&ages, &rates}) {
      require(table->size() > 0 && *std::min_element(table->begin(), table->end()) >= 0,
              "a table of groups is empty or has a negative one");
    }
  }
  int64_t age(int64_t passes) const {
    require(passes >= 0, "an expert was used in a pass to come");
    return group_of_age[std::min(passes, group_of_age.size() - 1)];
  }
  int64_t rate(double rate) const {
    require(0.0 <= rate && rate <= 1.0, "a rate is a share of passes");
    return group_of_rate[static_cast<int64_t>(rate * static_cast<double>(group_of_rate.size() - 1))];
  }
};

template <class... Tables>
void require_equal_shapes(const Tables&... tables) {
  const int64_t L = std::min({tables.shape(0)...}), E = std::min({tables.shape(1)...});
  require(((tables.shape(0) == L && tables.shape(1) == E) && ...), "tables of different shapes");
}

void note_uses(int64_t now, const NumpyView<const bool, 2>& activated, double pace,
               const Numbers& group_of_age, const Numbers& group_of_rate,
               const NumpyView<int64_t, 2>& last, const NumpyView<double, 2>& rate,
               const NumpyView<int64_t, 2>& groups) {
  require_equal_shapes(activated, last, rate, groups);
  const AgeAndRate group(group_of_age, group_of_rate);
  const int64_t rates = group_of_rate[group_of_rate.size() - 1] + 1;
  for (int64_t layer = 0; layer < rate.shape(0); ++layer) {
    for (int64_t e = 0; e < rate.shape(1); ++e) {
      const bool used = activated.row(layer)[e];
      double& mean = rate.row(layer)[e];
      if (used) last.row(layer)[e] = now;
      mean += pace * (static_cast<double>(used) - mean);
      groups.row(layer)[e] = group.age(now - last.row(layer)[e]) * rates + group.rate(mean);
    }
  }
}

void value_experts(int64_t now, const NumpyView<const double, 2>& values,
                   const NumpyView<const int64_t, 2>& last, const NumpyView<const double, 2>& rate,
                   const Numbers& group_of_age, const Numbers& group_of_rate,
                   const NumpyView<double, 2>& active, const NumpyView<double, 2>& idle) {
  require_equal_shapes(last, rate, active, idle);
  const AgeAndRate group(group_of_age, group_of_rate);
  require(values.shape(0) > *std::max_element(group_of_age.begin(), group_of_age.end()) &&
              values.shape(1) > *std::max_element(group_of_rate.begin(), group_of_rate.end()),
          "a group has no value");
  for (int64_t layer = 0; layer < rate.shape(0); ++layer) {
    for (int64_t e = 0; e < rate.shape(1); ++e) {
      const int64_t column = group.rate(rate.row(layer)[e]);
      active.row(layer)[e] = values.row(0)[column];
      idle.row(layer)[e] = values.row(group.age(now - last.row(layer)[e]))[column];
    }
  }
}

void mark_greatest(const NumpyView<const double, 2>& keys, int64_t count,
                   const NumpyView<bool, 2>& chosen) {
  require_equal_shapes(keys, chosen);
  require(count >= 0, "a negative number of keys cannot be the greatest");
  std::vector<int64_t> candidates;
  for (int64_t layer = 0; layer < keys.shape(0); ++layer) {
    const double* row = keys.row(layer);
    bool* marks = chosen.row(layer);
    std::fill(marks, marks + keys.shape(1), false);
    candidates.clear();
    for (int64_t e = 0; e < keys.shape(1); ++e) {
      if (row[e] > -INFINITY) candidates.push_back(e);
    }
    if (static_cast<int64_t>(candidates.size()) > count) {
      std::nth_element(candidates.begin(), candidates.begin() + count, candidates.end(),
                       [row](int64_t a, int64_t b) {
                         return row[a] > row[b] || (row[a] == row[b] && a < b);
                       });
      candidates.resize(count);
    }
    for (int64_t e : candidates) marks[e] = true;
  }
}

}  // namespace

void bind_reuse(nb::module_& planning) {
  planning.def("score_reuse", &score_reuse);
  planning.def("note_uses", &note_uses);
  planning.def("value_experts", &value_experts);
  planning.def("mark_greatest", &mark_greatest);
}

}  // namespace oled_jax
