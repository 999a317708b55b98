// Row ops of a decoder layer: RMS norm (with the residual sum), SwiGLU, rotary embedding, and
// writing to the paged cache. One pass over each row, fp32 arithmetic, one rounding at the end.
#pragma once

#include "parallel.h"
#include "vector.h"

constexpr int CHAINS = 4;  // sums kept apart, so that one add need not wait for the last

template <class T>
float sum_of_squares(const T* x, int64_t size) {
  Vec sum[CHAINS] = {};
  int64_t i = 0;
  for (; i + CHAINS * LANES <= size; i += CHAINS * LANES)
    for (int c = 0; c < CHAINS; c++) {
      Vec v = load(x + i + c * LANES);
      sum[c] = fused(v, v, sum[c]);
    }
  for_runs(size - i, [&](int64_t j, int64_t n) {
    Vec v = load_run(x + i + j, n);
    sum[0] = fused(v, v, sum[0]);
  });
  return sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

template <class T>
void norm_row(T* y, float* rstd, const T* x, const T* weight, int64_t size, float eps) {
  float r = 1.0f / std::sqrt(sum_of_squares(x, size) / (float)size + eps);
  *rstd = r;
  for_runs(size, [&](int64_t i, int64_t n) {
    store_run(y + i, load_run(x + i, n) * r * load_run(weight + i, n), n);
  });
}

// Rows of a tensor [tokens, heads, size] whose tokens lie x_stride apart.
template <class T>
void rms_norm(T* y, float* rstd, const T* x, const T* weight, int64_t tokens, int64_t heads,
              int64_t size, int64_t x_stride, float eps, int64_t threads) {
  parallel_for(tokens, threads_for(tokens * heads * size, threads), [&](int64_t t) {
    for (int64_t h = 0; h < heads; h++) {
      int64_t row = t * heads + h;
      norm_row(y + row * size, rstd + row, x + t * x_stride + h * size, weight, size, eps);
    }
  });
}

template <class T>
void add_rms_norm(T* y, T* total, float* rstd, const T* x, const T* residual, const T* weight,
                  int64_t rows, int64_t size, float eps, int64_t threads) {
  parallel_for(rows, threads_for(rows * size, threads), [&](int64_t r) {
    T* sum = total + r * size;
    const T *a = x + r * size, *b = residual + r * size;
    for_runs(size, [&](int64_t i, int64_t n) {
      store_run(sum + i, load_run(b + i, n) + load_run(a + i, n), n);
    });
    norm_row(y + r * size, rstd + r, sum, weight, size, eps);
  });
}

template <class T>
void swiglu(T* y, const T* gate_up, int64_t rows, int64_t size, int64_t threads) {
  parallel_for(rows, threads_for(4 * rows * size, threads), [&](int64_t r) {
    const T *gate = gate_up + 2 * r * size, *up = gate + size;
    for_runs(size, [&](int64_t i, int64_t n) {
      Vec g = load_run(gate + i, n);
      Vec sigmoid = splat(1.0f) / (splat(1.0f) + exp(-g));
      store_run(y + r * size + i, g * sigmoid * load_run(up + i, n), n);
    });
  });
}

// Rotates `heads` heads of each token by its row of cos and sin; NeoX halves.
template <class T>
void rotate(T* y, const T* x, const float* cos, const float* sin, int64_t heads, int64_t half) {
  for (int64_t h = 0; h < heads; h++, x += 2 * half, y += 2 * half)
    for_runs(half, [&](int64_t i, int64_t n) {
      Vec c = load_run(cos + i, n), s = load_run(sin + i, n);
      Vec a = load_run(x + i, n), b = load_run(x + half + i, n);
      store_run(y + i, fused(a, c, -(b * s)), n);
      store_run(y + half + i, fused(b, c, a * s), n);
    });
}

template <class T>
void rope(T* q_out, T* k_out, const T* q, const T* k, const float* cos, const float* sin,
          int64_t tokens, int64_t q_heads, int64_t k_heads, int64_t half, int64_t q_stride,
          int64_t k_stride, int64_t threads) {
  const int64_t num_elements = tokens * (q_heads + k_heads) * 2 * half;
  parallel_for(tokens, threads_for(num_elements, threads), [&](int64_t t) {
    const float *c = cos + t * half, *s = sin + t * half;
    rotate(q_out + t * q_heads * 2 * half, q + t * q_stride, c, s, q_heads, half);
    rotate(k_out + t * k_heads * 2 * half, k + t * k_stride, c, s, k_heads, half);
  });
}

// A key at a row of a cache whose keys lie in runs, as attention multiplies them: word w of LANES
// keys side by side, [words of a key][LANES]. A run takes the place of its keys' rows.
template <class T>
void store_key(T* cache, const T* key, int64_t row, int64_t size) {
  constexpr int64_t P = PER_WORD<T>;
  T* to = cache + row / LANES * LANES * size + row % LANES * P;
  for (int64_t d = 0; d < size; d += P) memcpy(to + d * LANES, key + d, P * sizeof(T));
}

// Token t's head h goes to row rows[t] + h * head_rows of each cache, rows of `size` elements.
template <class T>
void store_kv(T* k_cache, T* v_cache, const T* k, const T* v, const int64_t* rows, int64_t tokens,
              int64_t heads, int64_t size, int64_t k_stride, int64_t v_stride, int64_t head_rows,
              int64_t has_key_runs) {
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads; h++) {
      const int64_t row = rows[t] + h * head_rows;
      const T* key = k + t * k_stride + h * size;
      if (has_key_runs)
        store_key(k_cache, key, row, size);
      else
        memcpy(k_cache + row * size, key, size * sizeof(T));
      memcpy(v_cache + row * size, v + t * v_stride + h * size, size * sizeof(T));
    }
}
