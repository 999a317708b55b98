// A draw from the likeliest tokens of a row (top-k, top-p, min-p), without a sort.
//
// A token is kept if fewer than k tokens have a larger logit, if those together have less than p of
// the mass, and if its weight is at least min_p times the largest. What ties with the last one kept
// is kept too. The first two conditions together say "above a pivot", which is searched by counting
// what lies above three values at a time; the bounds are bits of a float in an order-preserving
// integer, so the search ends. Masses are sums of fp32 weights; where these are too close to p to
// tell, the tokens in question are sorted and summed in fp64. So the kept are an fp64 reference's.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>

#include "logits.h"

constexpr int PROBES = 3;
// An fp32 mass and p * total together may be off by so much of the total: each by 2^-22 for e^x,
// 2^-18 for the rounding of its argument and (RUN / LANES + 2) * 2^-24 for a run's sum, at most.
constexpr double SLACK = 1.0 / (1 << 15);

inline int64_t key_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
inline float float_of(int64_t key) {
  int32_t bits = (int32_t)key;
  bits ^= (bits >> 31) & 0x7fffffff;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// How many tokens lie above a value, and the sum of their weights.
struct Above {
  int64_t count = 0;
  double mass = 0;
};

constexpr int64_t PAD = 16;  // a multiple of LANES on every processor

// Logits and weights side by side, padded to whole vectors by tokens of no weight.
struct Tokens {
  std::vector<float> x, weights;
  int64_t size = 0;

  void resize(int64_t count) {
    size = (count + PAD - 1) / PAD * PAD;
    x.resize(size);
    weights.resize(size);
    for (int64_t i = count; i < size; i++) {
      x[i] = -INFINITY;
      weights[i] = 0;
    }
  }

  void count_above(const float* values, Above* found) const {
    for (int j = 0; j < PROBES; j++) found[j] = Above();
    for (int64_t lo = 0; lo < size; lo += RUN) {
      int64_t end = size - lo < RUN ? size : lo + RUN;
      Vec masses[PROBES] = {};
      IntVec counts[PROBES] = {};
      for (int64_t i = lo; i < end; i += LANES) {
        Vec logits = load(&x[i]), w = load(&weights[i]);
        for (int j = 0; j < PROBES; j++) {
          IntVec is_above = logits > splat(values[j]);
          counts[j] -= is_above;
          masses[j] += choose(is_above, w, splat(0.0f));
        }
      }
      for (int j = 0; j < PROBES; j++) {
        found[j].count += (int64_t)sum_lanes(__builtin_convertvector(counts[j], Vec));
        found[j].mass += sum_lanes(masses[j]);
      }
    }
  }

  // Those with low < x <= high; `from` may be this one.
  void take(const Tokens& from, int64_t count, float low, float high) {
    if (&from != this) {
      x.resize(from.size + PAD);
      weights.resize(from.size + PAD);
    }
    const float *from_x = from.x.data(), *from_weights = from.weights.data();
    float *to_x = x.data(), *to_weights = weights.data();
    for (int64_t i = 0, n = 0; n < count; i += LANES) {
      Vec logits = load(from_x + i);
      IntVec is_taken = (logits > splat(low)) & (logits <= splat(high));
      if (max_lanes(choose(is_taken, splat(1.0f), splat(0.0f))) == 0.0f) continue;
      int32_t masks[LANES];
      memcpy(masks, &is_taken, sizeof masks);
      for (int64_t j = 0; j < LANES; j++) {
        to_x[n] = from_x[i + j];
        to_weights[n] = from_weights[i + j];
        n -= masks[j];
      }
    }
    resize(count);
  }
};

// As many bytes as a Vec.
constexpr int WIDE_LANES = LANES / 2;
typedef double WideVec __attribute__((vector_size(4 * LANES)));
typedef int64_t WideIntVec __attribute__((vector_size(4 * LANES)));
typedef uint64_t WideBitsVec __attribute__((vector_size(4 * LANES)));
typedef float NarrowVec __attribute__((vector_size(2 * LANES)));

// e^x for x <= 0, to fp64's precision; 0 below -700. Cody and Waite's reduction, Taylor's series.
inline WideVec exp64(WideVec x) {
  WideVec shifted = x * 1.4426950408889634 + 6755399441055744.0;  // 1.5 * 2^52 rounds to integers
  WideVec n = shifted - 6755399441055744.0;
  WideVec r = x - n * 0.693147180369123816490 - n * 1.90821492927058770002e-10;
  constexpr double FACTORIALS[] = {479001600, 39916800, 3628800, 362880, 40320, 5040, 720,
                                   120,       24,       6,       2,      1,     1};
  WideVec p = WideVec{} + 1.0 / 6227020800.0;
  for (double factorial : FACTORIALS) p = p * r + 1.0 / factorial;
  WideBitsVec scale = ((WideBitsVec)shifted << 52) + 0x3ff0000000000000u;
  return (WideVec)((WideIntVec)(p * (WideVec)scale) & (x >= -700.0));
}

// Which tokens of a row are kept.
template <class T>
struct Truncation {
  const Row<T>& row;
  const Tokens& all;
  double highest;  // z
  double total;    // of all weights
  int64_t top_k;
  double top_p;

  // Whether a token with these above it is kept: 1 or 0; -1 if the sums are too close to tell.
  int is_kept(const Above& above) const {
    if (above.count >= top_k) return 0;
    if (top_p >= 1 || above.mass < (top_p - SLACK) * total) return 1;
    return above.mass > (top_p + SLACK) * total ? 0 : -1;
  }

  // The value above which exactly the kept lie.
  float find_pivot(float highest_logit, Tokens& few) const {
    if (top_k >= row.size && top_p >= 1) return -INFINITY;
    const Tokens* tokens = &all;
    int64_t low = key_of(-INFINITY), high = key_of(highest_logit);
    Above base, at_high;  // what lies above the tokens looked at; above `high`
    int64_t num_low = row.size;
    for (bool is_first = true; high - low > 1 && num_low - at_high.count > 1; is_first = false) {
      float values[PROBES];
      for (int j = 0; j < PROBES; j++) {
        // First where the pivot of a language model usually is: e^-12, e^-6, e^-3 of the largest.
        float guess = highest_logit - row.temperature * (float)(12 >> j);
        values[j] = is_first ? guess : float_of(low + (high - low) * (j + 1) / (PROBES + 1));
      }
      Above found[PROBES];
      tokens->count_above(values, found);
      bool is_clear = true;
      for (int j = 0; j < PROBES; j++) {  // in ascending order
        int64_t key = key_of(values[j]);
        if (key <= low || key >= high) continue;
        found[j].count += base.count;
        found[j].mass += base.mass;
        int kept = is_kept(found[j]);
        if (kept == 0) {
          low = key;
          num_low = found[j].count;
        } else if (kept == 1) {
          high = key;
          at_high = found[j];
          break;
        } else {
          is_clear = false;
        }
      }
      int64_t num_left = num_low - at_high.count;
      if (num_left * 4 < tokens->size || !is_clear) {
        few.take(*tokens, num_left, float_of(low), float_of(high));
        tokens = &few;
        base = at_high;
      }
      if (!is_clear) return find_exactly(few, num_left, float_of(low), float_of(high), at_high);
    }
    return float_of(low);
  }

  // The same among the `count` tokens of `few`, which lie above `low` and not above `high`.
  float find_exactly(Tokens& few, int64_t count, float low, float high, const Above& above) const {
    WideVec totals = {}, aboves = {};
    for (int64_t i = 0; i < all.size; i += WIDE_LANES) {
      NarrowVec x;
      memcpy(&x, &all.x[i], sizeof x);
      WideVec w = weights64(x);
      totals += w;
      aboves += (WideVec)((WideIntVec)w & (__builtin_convertvector(x, WideVec) > (double)high));
    }
    double limit = 0, mass = 0;
    for (int j = 0; j < WIDE_LANES; j++) {
      limit += top_p * totals[j];
      mass += aboves[j];
    }
    std::sort(few.x.begin(), few.x.begin() + count, std::greater<float>());
    for (int64_t i = 0; i < count;) {
      if (above.count + i >= top_k || !(mass < limit)) return few.x[i];
      float value = few.x[i];
      for (; i < count && few.x[i] == value; i++) mass += weights64(NarrowVec{} + value)[0];
    }
    return low;
  }

  WideVec weights64(NarrowVec logits) const {
    NarrowVec z = row.temperature == 1.0f ? logits : logits / row.temperature;
    return exp64(__builtin_convertvector(z, WideVec) - highest);
  }
};

template <class T>
void pick_kept_one(const Row<T>& row, int64_t top_k, double top_p, double min_p, double u,
                   int64_t* token, float* logp, float* kept_logp) {
  struct Scratch {
    Tokens all, few;
    std::vector<float> run_sums;
  };
  thread_local Scratch scratch;
  Scratch& mine = scratch;  // found once: in a shared library each look-up is a call
  Tokens &all = mine.all, &few = mine.few;
  std::vector<float>& run_sums = mine.run_sums;
  all.resize(row.size);
  run_sums.resize((row.size + RUN - 1) / RUN);
  float highest = row.highest(), highest_logit = -INFINITY;
  Sums sums = sum_weights<false>(row, highest, nullptr, all.weights.data());
  for_runs(row.size, [&](int64_t i, int64_t n) {
    store_run(&all.x[i], load_run(row.logits + i, n), n);
  });
  for (int64_t i = 0; i < all.size; i += LANES)
    highest_logit = std::fmax(highest_logit, max_lanes(load(&all.x[i])));
  float pivot = -INFINITY;
  bool has_mass = sums.weights > 0 && sums.weights < INFINITY;  // else a logit is NaN or infinite
  if (has_mass) {
    Truncation<T> truncation{row, all, highest, sums.weights, top_k, top_p};
    pivot = truncation.find_pivot(highest_logit, few);
  }
  double lowest = (double)highest + std::log(min_p);
  float floor = (float)lowest;
  if (floor < lowest) floor = std::nextafter(floor, INFINITY);
  double total = 0;
  for (int64_t lo = 0; lo < all.size; lo += RUN) {
    int64_t end = all.size - lo < RUN ? all.size : lo + RUN;
    Vec kept = {};
    for (int64_t i = lo; i < end; i += LANES) {
      Vec x = load(&all.x[i]);
      IntVec is_kept = (x > splat(pivot)) & (row.tempered(x) >= splat(floor));
      Vec w = choose(is_kept, load(&all.weights[i]), splat(0.0f));
      store(&all.weights[i], w);
      kept += w;
    }
    run_sums[lo / RUN] = sum_lanes(kept);
    total += run_sums[lo / RUN];
  }
  *token = draw(row.size, total, run_sums.data(), u, [&](int64_t i, int64_t n) {
    return load_run(&all.weights[i], n);
  });
  *logp = row.z(*token) - sums.lse(highest);
  *kept_logp = (float)std::log(all.weights[*token] / total);
}

// One token a row among those that the truncation keeps; its log-prob over the whole row, the same
// bits as `score`'s, and among the kept.
template <class T>
void pick_kept(const T* logits, int64_t rows, int64_t size, int64_t stride, float temperature,
               const int64_t* top_k, const double* top_p, const double* min_p, const double* u,
               int64_t* token, float* logp, float* kept_logp, int64_t threads) {
  parallel_for(rows, threads_for(rows * size, threads), [&](int64_t r) {
    Row<T> row{logits + r * stride, size, temperature};
    int64_t k = top_k[r] > 0 ? top_k[r] : std::numeric_limits<int64_t>::max();
    pick_kept_one(row, k, top_p[r], min_p[r], u[r], token + r, logp + r, kept_logp + r);
  });
}

// The `counts[r]` likeliest tokens of each row, most likely first, of equals the smaller id; and
// their log-probs, the same bits as `score`'s. Rows of `width` entries.
template <class T>
void likeliest(const T* logits, int64_t rows, int64_t size, int64_t stride, float temperature,
               const int64_t* counts, int64_t width, int64_t* ids, float* logp, int64_t threads) {
  struct Entry {
    float x;
    int64_t id;
    bool operator<(const Entry& other) const {  // "comes first": a heap has the last in front
      return x > other.x || (x == other.x && id < other.id);
    }
  };
  parallel_for(rows, threads_for(rows * size, threads), [&](int64_t r) {
    Row<T> row{logits + r * stride, size, temperature};
    float highest = row.highest();
    float lse = sum_weights<false>(row, highest, nullptr).lse(highest);
    std::vector<Entry> best;
    for (int64_t lo = 0; lo < size; lo += RUN) {
      int64_t end = size - lo < RUN ? size : lo + RUN;
      bool is_full = (int64_t)best.size() == counts[r];
      if (is_full) {
        Row<T> run{row.logits + lo, end - lo, 1.0f};
        if (!(run.highest() > best.front().x)) continue;
      }
      for (int64_t i = lo; i < end; i++) {
        float x = load_part(row.logits + i, 1)[0];
        Entry entry{x == x ? x : -INFINITY, i};  // NaN has no place in an order
        if ((int64_t)best.size() == counts[r]) {
          if (!(entry < best.front())) continue;
          std::pop_heap(best.begin(), best.end());
          best.pop_back();
        }
        best.push_back(entry);
        std::push_heap(best.begin(), best.end());
      }
    }
    std::sort_heap(best.begin(), best.end());
    for (int64_t j = 0; j < (int64_t)best.size(); j++) {
      ids[r * width + j] = best[j].id;
      logp[r * width + j] = row.z(best[j].id) - lse;
    }
  });
}
