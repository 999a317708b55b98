// The gradients of the row ops (rows.h): one pass over a row, fp32 arithmetic, one rounding. The
// rotation's is the rotation back, so it has none here.
//
// The gradient of a norm's weight is summed over fixed chunks of tokens, each in order, and the
// chunks are added in order: its bits do not depend on the threads.
#pragma once

#include <algorithm>
#include <vector>

#include "rows.h"

constexpr int64_t CHUNK_TOKENS = 32;

// Sum of a * b * c.
template <class T>
float sum_of_products(const T* a, const T* b, const T* c, int64_t size) {
  Vec sum[CHAINS] = {};
  int64_t i = 0;
  for (; i + CHAINS * LANES <= size; i += CHAINS * LANES)
    for (int j = 0; j < CHAINS; j++) {
      const int64_t at = i + j * LANES;
      sum[j] = fused(load(a + at) * load(b + at), load(c + at), sum[j]);
    }
  for_runs(size - i, [&](int64_t j, int64_t n) {
    const int64_t at = i + j;
    sum[0] = fused(load_run(a + at, n) * load_run(b + at, n), load_run(c + at, n), sum[0]);
  });
  return sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// dx = r * (g - n * mean(g * n)) + dtotal, dweight += dy * n, for n = x * r and g = dy * weight.
template <class T>
void differentiate_norm_row(T* dx, float* dweight, const T* dy, const T* x, const T* weight,
                            float r, const T* dtotal, int64_t size) {
  const float mean = sum_of_products(dy, weight, x, size) * r / (float)size;
  for_runs(size, [&](int64_t i, int64_t n) {
    Vec y = load_run(dy + i, n), normed = load_run(x + i, n) * r;
    Vec to = (y * load_run(weight + i, n) - normed * mean) * r;
    if (dtotal) to += load_run(dtotal + i, n);
    store_run(dx + i, to, n);
    store_run(dweight + i, fused(y, normed, load_run(dweight + i, n)), n);
  });
}

// Of rows [tokens, heads, size], of which those of x lie x_stride apart from token to token. `dtotal`,
// the gradient of the sum that was normalised by whoever else reads it, may be null.
template <class T>
void differentiate_rms_norm(T* dx, T* dweight, const T* dy, const T* x, const T* weight,
                            const float* rstd, const T* dtotal, int64_t tokens, int64_t heads,
                            int64_t size, int64_t x_stride, int64_t threads) {
  const int64_t num_chunks = (tokens + CHUNK_TOKENS - 1) / CHUNK_TOKENS;
  std::vector<float> parts(num_chunks * size);
  const int64_t num_threads = threads_for(tokens * heads * size, threads);
  parallel_for(num_chunks, num_threads, [&](int64_t chunk) {
    const int64_t end = std::min(tokens, (chunk + 1) * CHUNK_TOKENS);
    for (int64_t t = chunk * CHUNK_TOKENS; t < end; t++)
      for (int64_t h = 0; h < heads; h++) {
        const int64_t row = t * heads + h, at = row * size;
        differentiate_norm_row(dx + at, &parts[chunk * size], dy + at, x + t * x_stride + h * size,
                               weight, rstd[row], dtotal ? dtotal + at : nullptr, size);
      }
  });
  for_runs(size, [&](int64_t i, int64_t n) {
    Vec sum = {};
    for (int64_t chunk = 0; chunk < num_chunks; chunk++)
      sum += load_run(&parts[chunk * size + i], n);
    store_run(dweight + i, sum, n);
  });
}

// dup = dy * silu(gate), dgate = dy * up * (sigmoid + silu - silu * sigmoid).
template <class T>
void differentiate_swiglu(T* grad, const T* dy, const T* gate_up, int64_t rows, int64_t size,
                          int64_t threads) {
  parallel_for(rows, threads_for(4 * rows * size, threads), [&](int64_t r) {
    const T *gate = gate_up + 2 * r * size, *up = gate + size, *y = dy + r * size;
    T *dgate = grad + 2 * r * size, *dup = dgate + size;
    for_runs(size, [&](int64_t i, int64_t n) {
      Vec g = load_run(gate + i, n), d = load_run(y + i, n);
      Vec sigmoid = splat(1.0f) / (splat(1.0f) + exp(-g));
      Vec silu = g * sigmoid;
      store_run(dup + i, d * silu, n);
      store_run(dgate + i, d * load_run(up + i, n) * (sigmoid + fused(-silu, sigmoid, silu)), n);
    });
  });
}
