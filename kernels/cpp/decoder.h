// The layers of a dense decoder over a paged cache, without gradients, in one call: the functions
// of the other files in the order of nanoengine/model/layers.py, hence the same bits. What it saves
// is the interpreter between them: reading a layer's weights evicts it from the processor's cache,
// so that ten calls cost a fifth of a millisecond a layer.
#pragma once

#include <vector>

#include "attention.h"
#include "linear.h"
#include "low_rank.h"
#include "rows.h"

template <class T>
struct Layer {  // addresses; a scale, a bias and the norms of heads may be null
  const T* input_norm;
  Matrix<T> qkv;
  const T *q_norm, *k_norm;
  Matrix<T> out;
  const T* post_norm;
  Matrix<T> gate_up, down;
  T *k_cache, *v_cache;
};

struct Switches {  // of one layer
  int64_t window;    // as in Problem
  int64_t has_rope;  // always, where heads are normalised
};

struct Sizes {
  int64_t tokens, hidden, q_heads, k_heads, head_dim, mlp;
  int64_t cache_row, cache_head, head_rows, has_key_runs;  // as in Problem and store_kv
};

template <class T>
struct Step {
  const float *cos, *sin;  // [tokens, head_dim / 2]
  const int64_t* rows;     // of the cache, one a token
  const int32_t* key_rows;
  const Tile* tiles;
  int64_t num_tiles;
};

// Memory of one call, in the order in which it is asked for. It is the caller's, and kept: a fresh
// page costs more than what is written there.
template <class T>
struct Buffers {
  T* next;
  T* take(int64_t n) {
    T* p = next;
    next += (n + LANES - 1) / LANES * LANES;
    return p;
  }
  T *residual, *y, *qkv, *q, *k, *o, *gate_up, *h;

  // Returns the elements taken.
  int64_t lay_out(const Sizes& s) {
    T* first = next;
    const int64_t q_width = s.q_heads * s.head_dim, kv_width = s.k_heads * s.head_dim;
    residual = take(s.tokens * s.hidden);
    y = take(s.tokens * s.hidden);
    qkv = take(s.tokens * (q_width + 2 * kv_width));
    q = take(s.tokens * q_width);
    k = take(s.tokens * kv_width);
    o = take(s.tokens * q_width);
    gate_up = take(s.tokens * 2 * s.mlp);
    h = take(s.tokens * (s.mlp > kv_width ? s.mlp : kv_width));
    return next - first;
  }
};

template <class T>
void multiply(T* x, float factor, int64_t rows, int64_t size, int64_t threads) {
  if (factor == 1.0f) return;
  parallel_for(rows, threads_for(rows * size, threads), [&](int64_t r) {
    for_runs(size, [&](int64_t i, int64_t n) {
      store_run(x + r * size + i, load_run(x + r * size + i, n) * splat(factor), n);
    });
  });
}

// `x` [tokens, hidden] holds embeddings and then the layers' result after the last norm.
// `multiplier`: of what attention and MLP add to the residual stream.
template <class T>
void decode(T* x, const Layer<T>* layers, const Switches* switches, int64_t num_layers,
            const T* last_norm, const Sizes& size, const Step<T>& step, T* scratch, float eps,
            float scale, float multiplier, int64_t threads) {
  const int64_t N = size.tokens, E = size.hidden, D = size.head_dim;
  const int64_t q_width = size.q_heads * D, kv_width = size.k_heads * D;
  const int64_t width = q_width + 2 * kv_width;
  Buffers<T> buffers{scratch, {}, {}, {}, {}, {}, {}, {}, {}};
  buffers.lay_out(size);
  T *residual = buffers.residual, *y = buffers.y, *qkv = buffers.qkv, *q = buffers.q;
  T *k = buffers.k, *o = buffers.o, *gate_up = buffers.gate_up, *h = buffers.h;
  memcpy(residual, x, N * E * sizeof(T));
  std::vector<float> rstd(N * size.q_heads);
  const int64_t heads[2] = {size.q_heads, size.k_heads};
  for (int64_t i = 0; i < num_layers; i++) {
    const Layer<T>& layer = layers[i];
    if (i == 0)
      rms_norm(y, rstd.data(), x, layer.input_norm, N, 1, E, E, eps, threads);
    else
      add_rms_norm(y, residual, rstd.data(), x, residual, layer.input_norm, N, E, eps, threads);
    linear(qkv, y, layer.qkv, N, E, width, E, threads);
    const T *q_in = qkv, *k_in = qkv + q_width, *v = k_in + kv_width;
    int64_t q_stride = width, k_stride = width;
    if (layer.q_norm) {  // into o and h, which are free until later
      rms_norm(o, rstd.data(), q_in, layer.q_norm, N, heads[0], D, width, eps, threads);
      rms_norm(h, rstd.data(), k_in, layer.k_norm, N, heads[1], D, width, eps, threads);
      q_in = o, k_in = h, q_stride = q_width, k_stride = kv_width;
    }
    if (switches[i].has_rope) {
      rope(q, k, q_in, k_in, step.cos, step.sin, N, heads[0], heads[1], D / 2, q_stride, k_stride,
           threads);
      q_in = q, k_in = k, q_stride = q_width, k_stride = kv_width;
    }
    store_kv(layer.k_cache, layer.v_cache, k_in, v, step.rows, N, heads[1], D, k_stride, width,
             size.head_rows, size.has_key_runs);
    Problem<T> problem{o,
                       q_in,
                       layer.k_cache,
                       layer.v_cache,
                       step.key_rows,
                       heads[1],
                       heads[0] / heads[1],
                       D,
                       q_stride,
                       size.cache_row,
                       size.cache_row,
                       size.cache_head,
                       size.cache_head,
                       scale,
                       switches[i].window,
                       size.has_key_runs};
    attend(problem, step.tiles, step.num_tiles, threads);
    linear(x, o, layer.out, N, q_width, E, q_width, threads);
    multiply(x, multiplier, N, E, threads);
    add_rms_norm(y, residual, rstd.data(), x, residual, layer.post_norm, N, E, eps, threads);
    linear(gate_up, y, layer.gate_up, N, E, 2 * size.mlp, E, threads);
    swiglu(h, gate_up, N, size.mlp, threads);
    linear(x, h, layer.down, N, size.mlp, E, size.mlp, threads);
    multiply(x, multiplier, N, E, threads);
  }
  add_rms_norm(y, residual, rstd.data(), x, residual, last_norm, N, E, eps, threads);
  memcpy(x, y, N * E * sizeof(T));
}
