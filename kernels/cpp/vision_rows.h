// Row ops of a vision tower and their gradients: layer norm with a bias, GELU. One pass over memory,
// fp32 arithmetic, one rounding at the end. The gradients of a norm's weight and bias are summed as
// in rows_gradient.h: over fixed chunks of rows, which are added in order.
#pragma once

#include "rows_gradient.h"

// Sum of f(vector at i, elements) over a row, in CHAINS chains; f gives zero behind the last of n.
template <class F>
float sum_row(int64_t size, F f) {
  Vec sum[CHAINS] = {};
  int64_t i = 0;
  for (; i + CHAINS * LANES <= size; i += CHAINS * LANES)
    for (int c = 0; c < CHAINS; c++) sum[c] += f(i + c * LANES, (int64_t)LANES);
  for_runs(size - i, [&](int64_t j, int64_t n) { sum[0] += f(i + j, n); });
  return sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

template <class T>
void layer_norm_row(T* y, float* mean, float* rstd, const T* x, const T* weight, const T* bias,
                    int64_t size, float eps) {
  const float m = sum_row(size, [&](int64_t i, int64_t n) { return load_run(x + i, n); }) / size;
  const float squares = sum_row(size, [&](int64_t i, int64_t n) {
    Vec v = load_run(x + i, n) - m;
    if (n < LANES) v = choose(first_lanes(n), v, Vec{});  // what is behind the row is not x
    return v * v;
  });
  const float r = 1.0f / std::sqrt(squares / size + eps);
  *mean = m, *rstd = r;
  for_runs(size, [&](int64_t i, int64_t n) {
    Vec normed = (load_run(x + i, n) - m) * r;
    store_run(y + i, fused(normed, load_run(weight + i, n), load_run(bias + i, n)), n);
  });
}

template <class T>
void layer_norm(T* y, float* mean, float* rstd, const T* x, const T* weight, const T* bias,
                int64_t rows, int64_t size, float eps, int64_t threads) {
  parallel_for(rows, threads_for(rows * size, threads), [&](int64_t r) {
    layer_norm_row(y + r * size, mean + r, rstd + r, x + r * size, weight, bias, size, eps);
  });
}

// dx = r * (g - mean(g) - n * mean(g * n)), dweight += dy * n, dbias += dy, for n = (x - m) * r and
// g = dy * weight.
template <class T>
void differentiate_layer_norm_row(T* dx, float* dweight, float* dbias, const T* dy, const T* x,
                                  const T* weight, float m, float r, int64_t size) {
  const float g_mean = sum_row(size, [&](int64_t i, int64_t n) {
    return load_run(dy + i, n) * load_run(weight + i, n);
  }) / size;
  const float gn_mean = sum_row(size, [&](int64_t i, int64_t n) {
    return load_run(dy + i, n) * load_run(weight + i, n) * ((load_run(x + i, n) - m) * r);
  }) / size;
  for_runs(size, [&](int64_t i, int64_t n) {
    Vec d = load_run(dy + i, n), normed = (load_run(x + i, n) - m) * r;
    Vec g = d * load_run(weight + i, n);
    store_run(dx + i, (g - g_mean - normed * gn_mean) * r, n);
    store_run(dweight + i, fused(d, normed, load_run(dweight + i, n)), n);
    store_run(dbias + i, load_run(dbias + i, n) + d, n);
  });
}

template <class T>
void differentiate_layer_norm(T* dx, T* dweight, T* dbias, const T* dy, const T* x,
                              const T* weight, const float* mean, const float* rstd, int64_t rows,
                              int64_t size, int64_t threads) {
  const int64_t num_chunks = (rows + CHUNK_TOKENS - 1) / CHUNK_TOKENS;
  std::vector<float> parts(2 * num_chunks * size);
  parallel_for(num_chunks, threads_for(rows * size, threads), [&](int64_t chunk) {
    float* part = parts.data() + 2 * chunk * size;
    const int64_t end = std::min(rows, (chunk + 1) * CHUNK_TOKENS);
    for (int64_t r = chunk * CHUNK_TOKENS; r < end; r++)
      differentiate_layer_norm_row(dx + r * size, part, part + size, dy + r * size, x + r * size,
                                   weight, mean[r], rstd[r], size);
  });
  for_runs(size, [&](int64_t i, int64_t n) {
    Vec of_weight = {}, of_bias = {};
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
      const float* part = parts.data() + 2 * chunk * size + i;
      of_weight += load_run(part, n), of_bias += load_run(part + size, n);
    }
    store_run(dweight + i, of_weight, n), store_run(dbias + i, of_bias, n);
  });
}

// -- GELU, x * share(x) ----------------------------------------------------------------------------

// The share of the standard normal distribution that lies below x, and its slope.
struct Share {
  Vec below, slope;
};

// By erfc(z) = exp(-z^2) * t * p(t), t = 1 / (1 + 0.4 z), for z = |x| / sqrt(2). The polynomial was fitted
// in fp64, for z up to 10, to a relative error of 6e-8.
inline Share normal_share(Vec x) {
  const Vec zero = {}, size = choose(x < zero, -x, x);
  const Vec bell = exp_below(x * x * -0.5f);
  const Vec t = splat(1.0f) / fused(size, splat(0.282842712f), splat(1.0f));
  Vec p = splat(4.12531272e-2f);
  p = fused(p, t, splat(-1.40319660e-1f));
  p = fused(p, t, splat(8.39881301e-2f));
  p = fused(p, t, splat(8.79634023e-2f));
  p = fused(p, t, splat(7.97571167e-2f));
  p = fused(p, t, splat(1.93392947e-1f));
  p = fused(p, t, splat(2.01887652e-1f));
  p = fused(p, t, splat(2.26443097e-1f));
  p = fused(p, t, splat(2.25634232e-1f));
  const Vec above = p * t * bell * 0.5f;
  return {choose(x < zero, above, splat(1.0f) - above), bell * 0.39894228f};
}

// The sigmoid of z = 2 * sqrt(2 / pi) * (x + 0.044715 * x^3).
inline Share sigmoid_share(Vec x) {
  const Vec square = x * x;
  const Vec z = x * fused(square, splat(0.07135481627f), splat(1.595769122f));
  const Vec z_slope = fused(square, splat(0.2140644488f), splat(1.595769122f));
  const Vec lowest = splat(-80.0f);
  const Vec e = exp(choose(z < lowest, -lowest, -z));  // e times the sigmoid must be 1, and NaN stay
  const Vec below = splat(1.0f) / (splat(1.0f) + e);
  return {below, below * (e * below) * z_slope};
}

constexpr int64_t GELU_CHUNK = 4096;  // elements that one thread takes at a time: whole vectors

// f(i, n) for runs of all elements, chunks of them shared among threads.
template <class F>
void for_chunks(int64_t size, int64_t threads, F f) {
  const int64_t num_chunks = (size + GELU_CHUNK - 1) / GELU_CHUNK;
  parallel_for(num_chunks, threads_for(4 * size, threads), [&](int64_t chunk) {
    const int64_t first = chunk * GELU_CHUNK;
    for_runs(std::min(GELU_CHUNK, size - first),
             [&](int64_t i, int64_t n) { f(first + i, n); });
  });
}

template <bool IS_TANH>
inline Share share_below(Vec x) {
  if constexpr (IS_TANH) return sigmoid_share(x);
  return normal_share(x);
}

template <bool IS_TANH, class T>
void gelu(T* y, const T* x, int64_t size, int64_t threads) {
  for_chunks(size, threads, [&](int64_t i, int64_t n) {
    Vec v = load_run(x + i, n);
    store_run(y + i, v * share_below<IS_TANH>(v).below, n);
  });
}

template <bool IS_TANH, class T>
void differentiate_gelu(T* dx, const T* dy, const T* x, int64_t size, int64_t threads) {
  for_chunks(size, threads, [&](int64_t i, int64_t n) {
    Vec v = load_run(x + i, n);
    Share share = share_below<IS_TANH>(v);
    store_run(dx + i, load_run(dy + i, n) * fused(v, share.slope, share.below), n);
  });
}
