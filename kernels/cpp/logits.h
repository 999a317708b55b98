// From a row of logits to its log-probs: log-sum-exp, entropy, the likeliest token, a drawn token.
//
// z = logit / temperature, weight = e^(z - max z). Weights are summed by runs of 256 tokens in
// fp32, and runs in fp64; a draw walks the runs, then the tokens of the run it falls into.
#pragma once

#include <vector>

#include "parallel.h"
#include "vector.h"

constexpr int64_t RUN = 256;

template <class T>
struct Row {
  const T* logits;
  int64_t size;
  float temperature;

  Vec tempered(Vec x) const { return temperature == 1.0f ? x : x / temperature; }
  Vec z(int64_t i, int64_t n) const { return tempered(load_run(logits + i, n)); }
  float z(int64_t i) const {
    Vec x = load_part(logits + i, 1);
    return temperature == 1.0f ? x[0] : x[0] / temperature;
  }
  // z of n < LANES elements, and -inf in the other lanes.
  Vec z_part(int64_t i, int64_t n) const {
    float padded[LANES];
    store(padded, z(i, n));
    for (int64_t j = n; j < LANES; j++) padded[j] = -INFINITY;
    return load(padded);
  }
  Vec z_or_nothing(int64_t i, int64_t n) const { return n == LANES ? z(i, n) : z_part(i, n); }

  float highest() const {
    Vec best = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) best = larger(best, load(logits + i));
    float most = max_lanes(best);
    for (; i < size; i++) {
      float x = load_part(logits + i, 1)[0];
      most = x > most ? x : most;
    }
    return temperature == 1.0f ? most : most / temperature;  // division keeps the order
  }
};

struct Sums {
  double weights = 0, products = 0;  // of the weights; of weight * (z - max z)
  float lse(float highest) const { return (float)std::log(weights) + highest; }
};

// `run_sums` [size / RUN, rounded up] and `all_weights` [size] may be null.
template <bool WITH_PRODUCTS, class T>
Sums sum_weights(const Row<T>& row, float highest, float* run_sums,
                 float* all_weights = nullptr) {
  Sums sums;
  for (int64_t lo = 0; lo < row.size; lo += RUN) {
    int64_t size = row.size - lo < RUN ? row.size - lo : RUN;
    Vec weights = {}, products = {};
    for_runs(size, [&](int64_t i, int64_t n) {
      Vec z = row.z_or_nothing(lo + i, n) - highest;
      Vec w = exp(z);
      weights += w;
      if (all_weights) store_run(all_weights + lo + i, w, n);
      if (WITH_PRODUCTS) products += choose(w > 0.0f, w * z, splat(0.0f));
    });
    float sum = sum_lanes(weights);
    if (run_sums) run_sums[lo / RUN] = sum;
    sums.weights += sum;
    if (WITH_PRODUCTS) sums.products += sum_lanes(products);
  }
  return sums;
}

template <class T>
int64_t first_of(const Row<T>& row, float highest) {
  for (int64_t lo = 0; lo < row.size; lo += RUN) {
    int64_t size = row.size - lo < RUN ? row.size - lo : RUN;
    IntVec found = {};
    for_runs(size, [&](int64_t i, int64_t n) {
      found |= row.z_or_nothing(lo + i, n) == highest;
    });
    if (max_lanes(choose(found, splat(1.0f), splat(0.0f))) == 0.0f) continue;
    for (int64_t i = lo; i < lo + size; i++)
      if (row.z(i) == highest) return i;
  }
  return 0;  // only where a logit is NaN: the log-prob then is too
}

// The first token whose cumulative weight exceeds u * sum; never one of weight 0. `weights_at(i, n)`
// are n weights from i on.
template <class F>
int64_t draw(int64_t size, double sum, const float* run_sums, double u, F weights_at) {
  double target = u * sum, before = 0;
  int64_t num_runs = (size + RUN - 1) / RUN, run = 0, last = 0;
  for (; run < num_runs; run++) {
    if (run_sums[run] > 0) last = run;
    if (before + run_sums[run] > target) break;
    before += run_sums[run];
  }
  if (run == num_runs) {  // only by the rounding of the last sum
    run = last;
    before -= run_sums[last];
  }
  int64_t lo = run * RUN, end = lo + RUN < size ? lo + RUN : size, found = lo;
  double total = 0, inside = target - before;
  for (int64_t i = lo; i < end; i += LANES) {
    int64_t n = end - i < LANES ? end - i : LANES;
    float w[LANES];
    store(w, weights_at(i, n));
    for (int64_t j = 0; j < n; j++) {
      if (w[j] > 0) found = i + j;
      total += w[j];
      if (w[j] > 0 && total > inside) return found;
    }
  }
  return found;
}

template <class T>
void score(const T* logits, int64_t rows, int64_t size, int64_t stride, float temperature,
           const int64_t* ids, float* logp, float* lse, float* entropy, int64_t threads) {
  parallel_for(rows, threads_for(rows * size, threads), [&](int64_t r) {
    Row<T> row{logits + r * stride, size, temperature};
    float highest = row.highest();
    Sums sums = entropy ? sum_weights<true>(row, highest, nullptr)
                        : sum_weights<false>(row, highest, nullptr);
    lse[r] = sums.lse(highest);
    logp[r] = row.z(ids[r]) - lse[r];
    if (entropy) entropy[r] = (float)(std::log(sums.weights) - sums.products / sums.weights);
  });
}

// In place, from logits to the gradient by them, of log-probs of `num_ids` tokens a row and of the
// row's entropy: (sum of dlogp * (onehot - p) - dentropy * p * (log p + entropy)) / temperature. The
// gradients by log-probs [rows, num_ids] and by entropies [rows] may be null.
template <class T>
void differentiate_scores(T* logits, int64_t rows, int64_t size, int64_t stride, float temperature,
                          const int64_t* ids, int64_t num_ids, const float* lse,
                          const float* entropy, const float* dlogp, const float* dentropy,
                          int64_t threads) {
  const float factor = 1.0f / temperature;
  parallel_for(rows, threads_for(rows * size, threads), [&](int64_t r) {
    T* at = logits + r * stride;
    Row<T> row{at, size, temperature};
    float total = 0.0f;
    for (int64_t m = 0; dlogp && m < num_ids; m++) total += dlogp[r * num_ids + m];
    const float e = dentropy ? dentropy[r] : 0.0f, constant = dentropy ? entropy[r] : 0.0f;
    // tokens are added before the one rounding
    thread_local std::vector<float> wide;
    if (sizeof(T) < sizeof(float)) wide.resize(size);
    float* to = sizeof(T) < sizeof(float) ? wide.data() : (float*)at;
    for_runs(size, [&](int64_t i, int64_t n) {
      Vec log_p = row.z(i, n) - lse[r], p = exp(log_p);
      Vec slope = splat(-total);
      if (dentropy) slope = choose(p > 0.0f, slope - (log_p + constant) * e, splat(0.0f));
      store_run(to + i, p * slope * factor, n);
    });
    for (int64_t m = 0; dlogp && m < num_ids; m++)
      to[ids[r * num_ids + m]] += dlogp[r * num_ids + m] * factor;
    if (sizeof(T) < sizeof(float))
      for_runs(size, [&](int64_t i, int64_t n) { store_run(at + i, load_run(to + i, n), n); });
  });
}

// u null: the likeliest token, of equals the first.
template <class T>
void pick(const T* logits, int64_t rows, int64_t size, int64_t stride, float temperature,
          const double* u, int64_t* token, float* logp, int64_t threads) {
  parallel_for(rows, threads_for(rows * size, threads), [&](int64_t r) {
    thread_local std::vector<float> run_sums;
    run_sums.resize((size + RUN - 1) / RUN);
    Row<T> row{logits + r * stride, size, temperature};
    float highest = row.highest();
    Sums sums = sum_weights<false>(row, highest, run_sums.data());
    auto weights_at = [&](int64_t i, int64_t n) { return exp(row.z_or_nothing(i, n) - highest); };
    token[r] = u ? draw(size, sums.weights, run_sums.data(), u[r], weights_at)
                 : first_of(row, highest);
    logp[r] = row.z(token[r]) - sums.lse(highest);
  });
}
