// Row ops of a decoder layer: RMS norm (with the residual sum), SwiGLU, rotary embedding, and
// writing to the paged cache. One pass over each row, fp32 arithmetic, one rounding at the end.
#include "parallel.h"
#include "vector.h"

namespace {

constexpr int CHAINS = 4;  // sums kept apart, so that one add need not wait for the last

template <class T>
float sum_of_squares(const T* x, int64_t size) {
  Vec sum[CHAINS] = {};
  int64_t i = 0;
  for (; i + CHAINS * LANES <= size; i += CHAINS * LANES)
    for (int c = 0; c < CHAINS; c++) {
      Vec v = load(x + i + c * LANES);
      sum[c] += v * v;
    }
  for_runs(size - i, [&](int64_t j, int64_t n) {
    Vec v = load_run(x + i + j, n);
    sum[0] += v * v;
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
  parallel_for(tokens, threads, [&](int64_t t) {
    for (int64_t h = 0; h < heads; h++) {
      int64_t row = t * heads + h;
      norm_row(y + row * size, rstd + row, x + t * x_stride + h * size, weight, size, eps);
    }
  });
}

template <class T>
void add_rms_norm(T* y, T* total, float* rstd, const T* x, const T* residual, const T* weight,
                  int64_t rows, int64_t size, float eps, int64_t threads) {
  parallel_for(rows, threads, [&](int64_t r) {
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
  parallel_for(rows, threads, [&](int64_t r) {
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
      store_run(y + i, a * c - b * s, n);
      store_run(y + half + i, b * c + a * s, n);
    });
}

template <class T>
void rope(T* q_out, T* k_out, const T* q, const T* k, const float* cos, const float* sin,
          int64_t tokens, int64_t q_heads, int64_t k_heads, int64_t half, int64_t q_stride,
          int64_t k_stride, int64_t threads) {
  parallel_for(tokens, threads, [&](int64_t t) {
    const float *c = cos + t * half, *s = sin + t * half;
    rotate(q_out + t * q_heads * 2 * half, q + t * q_stride, c, s, q_heads, half);
    rotate(k_out + t * k_heads * 2 * half, k + t * k_stride, c, s, k_heads, half);
  });
}

// Token t's head h goes to row rows[t] + h * head_rows of each cache, rows of `size` elements.
template <class T>
void store_kv(T* k_cache, T* v_cache, const T* k, const T* v, const int64_t* rows, int64_t tokens,
              int64_t heads, int64_t size, int64_t k_stride, int64_t v_stride,
              int64_t head_rows) {
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads; h++) {
      const int64_t to = (rows[t] + h * head_rows) * size;
      memcpy(k_cache + to, k + t * k_stride + h * size, size * sizeof(T));
      memcpy(v_cache + to, v + t * v_stride + h * size, size * sizeof(T));
    }
}

}  // namespace

#define ROW_OPS(T, SUFFIX)                                                                        \
  extern "C" void rms_norm_##SUFFIX(T* y, float* rstd, const T* x, const T* weight,              \
                                    int64_t tokens, int64_t heads, int64_t size,                 \
                                    int64_t x_stride, float eps, int64_t threads) {              \
    rms_norm(y, rstd, x, weight, tokens, heads, size, x_stride, eps, threads);                   \
  }                                                                                               \
  extern "C" void add_rms_norm_##SUFFIX(T* y, T* total, float* rstd, const T* x,                 \
                                        const T* residual, const T* weight, int64_t rows,        \
                                        int64_t size, float eps, int64_t threads) {              \
    add_rms_norm(y, total, rstd, x, residual, weight, rows, size, eps, threads);                 \
  }                                                                                               \
  extern "C" void swiglu_##SUFFIX(T* y, const T* gate_up, int64_t rows, int64_t size,            \
                                  int64_t threads) {                                              \
    swiglu(y, gate_up, rows, size, threads);                                                      \
  }                                                                                               \
  extern "C" void rope_##SUFFIX(T* q_out, T* k_out, const T* q, const T* k, const float* cos,    \
                                const float* sin, int64_t tokens, int64_t q_heads,               \
                                int64_t k_heads, int64_t half, int64_t q_stride,                 \
                                int64_t k_stride, int64_t threads) {                             \
    rope(q_out, k_out, q, k, cos, sin, tokens, q_heads, k_heads, half, q_stride, k_stride,       \
         threads);                                                                                \
  }                                                                                               \
  extern "C" void store_kv_##SUFFIX(T* k_cache, T* v_cache, const T* k, const T* v,              \
                                    const int64_t* rows, int64_t tokens, int64_t heads,          \
                                    int64_t size, int64_t k_stride, int64_t v_stride,            \
                                    int64_t head_rows) {                                          \
    store_kv(k_cache, v_cache, k, v, rows, tokens, heads, size, k_stride, v_stride, head_rows);   \
  }

ROW_OPS(float, f32)
ROW_OPS(bf16, bf16)
