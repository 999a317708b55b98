// One AdamW step in one pass over flat buffers: the gradient is scaled, both moments, the master and
// the weight that is rounded from it are renewed while they are in registers. Bound by memory: 28
// bytes a parameter move, in fp32 as in bf16 with its remainder.
//
// The arithmetic is that of PyTorch's one-pass kernel, operation by operation, so both give the same
// bits on whole vectors (PyTorch computes the odd end of a tensor without fused multiply-adds).
#pragma once

#include "parallel.h"
#include "vector.h"

// An fp32 master is its rounding to bf16 and what that leaves of its bits, a number from -2^15 to
// 2^15 - 1. One master that lies half way above an even bf16 would need 2^15: it is moved down by one
// unit in its last place (kernels/torch/split_master.py says why).
struct Remainder {
  int16_t bits;
};

inline BitsVec load_halves(const void* p, int64_t n) {
  HalfVec x = {};
  n == LANES ? memcpy(&x, p, sizeof x) : memcpy(&x, p, 2 * n);
  return widen(x);
}
inline void store_halves(void* p, BitsVec x, int64_t n) {
  const HalfVec half = narrow(x);
  n == LANES ? memcpy(p, &half, sizeof half) : memcpy(p, &half, 2 * n);
}

inline Vec load_master(const bf16* weight, const Remainder* rest, int64_t n) {
  const IntVec left = (IntVec)(load_halves(rest, n) << 16) >> 16;  // with its sign
  return as_floats((load_halves(weight, n) << 16) + (BitsVec)left);
}
inline void store_master(bf16* weight, Remainder* rest, Vec x, int64_t n) {
  const BitsVec rounded = round_to_bf16(x);
  const IntVec most = IntVec{} + 0x7fff, least = IntVec{} - 0x8000;
  IntVec left = (IntVec)(as_bits(x) - (rounded << 16));
  left = left > most ? most : left;
  left = left < least ? least : left;  // of a NaN, whose bits are not kept
  store_halves(weight, rounded, n), store_halves(rest, (BitsVec)left, n);
}

inline Vec load_master(const float* weight, const Remainder*, int64_t n) {
  return load_run(weight, n);
}
inline void store_master(float* weight, Remainder*, Vec x, int64_t n) { store_run(weight, x, n); }

// What a step multiplies by, as kernels/adamw.py computes it in fp64.
struct AdamW {
  float scale;       // of the gradient
  float decay;       // 1 - lr * weight_decay
  float rest1;       // 1 - beta1
  float beta2, rest2;
  float root_scale;  // sqrt(1 - beta2^t)
  float eps;
  float step_size;   // lr / (1 - beta1^t)
};

template <class T>
void adamw_run(T* weight, Remainder* rest, const float* grad, float* mean, float* square,
               int64_t n, const AdamW& by) {
  const Vec g = load_run(grad, n) * by.scale, before = load_run(mean, n);
  // the mean moves towards g from whichever of the two is nearer
  const bool is_near = by.rest1 < 0.5f;
  const Vec m = fused(splat(is_near ? by.rest1 : by.rest1 - 1), g - before, is_near ? before : g);
  const Vec v = fused(by.rest2 * g, g, load_run(square, n) * by.beta2);
  store_run(mean, m, n), store_run(square, v, n);
  const Vec root = square_root(v) / by.root_scale + by.eps;
  const Vec w = load_master(weight, rest, n) * by.decay;
  store_master(weight, rest, w + -by.step_size * m / root, n);
}

constexpr int64_t ADAMW_TASK = 1 << 14;  // elements

// `rest` is null where the weights are fp32, which are their own masters.
template <class T>
void adamw(T* weight, Remainder* rest, const float* grad, float* mean, float* square, int64_t size,
           const AdamW& by, int64_t threads) {
  const int64_t num_tasks = (size + ADAMW_TASK - 1) / ADAMW_TASK;
  parallel_for(num_tasks, threads_for(size, threads), [&](int64_t task) {
    const int64_t at = task * ADAMW_TASK;
    for_runs(std::min(ADAMW_TASK, size - at), [&](int64_t i, int64_t n) {
      i += at;
      adamw_run(weight + i, rest ? rest + i : rest, grad + i, mean + i, square + i, n, by);
    });
  });
}
