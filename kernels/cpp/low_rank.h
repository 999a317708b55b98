// The product with a low-rank change beside a matrix, y += (x . low^T) . high^T, and the matrices of a
// decoder, which may have one.
//
// In fp32 whatever T is, over linear.h's packed weights of fp32, and rounded once: the bits of the same
// products one by one, and of a row alone.
#pragma once

#include <vector>

#include "linear.h"

struct LowRankPart {  // the outputs begin..begin + width of the matrix
  const float* high;  // packed [width, rank]
  int64_t begin, width, rank;
};
struct LowRank {
  const float* low;  // packed [rank, inputs]: those of all parts, one below the other
  int64_t rank;      // the sum of theirs
  const LowRankPart* parts;
  int64_t num_parts;
};

template <class T>
void add_low_rank(T* y, const T* x, const LowRank& change, int64_t rows, int64_t inputs,
                  int64_t outputs, int64_t x_stride, int64_t threads) {
  if (rows == 0) return;
  thread_local std::vector<float> widened, lows, highs;  // of the calling thread, kept
  const float* input;
  if constexpr (sizeof(T) == sizeof(float)) {
    input = x;
  } else {
    widened.resize(rows * inputs);
    float* to = widened.data();
    parallel_for(rows, threads_for(rows * inputs, threads), [&](int64_t r) {
      for_runs(inputs, [&](int64_t i, int64_t n) {
        store_run(to + r * inputs + i, load_run(x + r * x_stride + i, n), n);
      });
    });
    input = to, x_stride = inputs;
  }
  lows.resize(rows * change.rank);
  linear(lows.data(), input, PackedWeight<float, float>{change.low, nullptr, nullptr}, rows, inputs,
         change.rank, x_stride, threads);
  const float* low = lows.data();
  for (int64_t p = 0; p < change.num_parts; p++) {
    const auto [high, begin, width, rank] = change.parts[p];
    highs.resize(rows * width);
    linear(highs.data(), low, PackedWeight<float, float>{high, nullptr, nullptr}, rows, rank, width,
           change.rank, threads);
    const float* from = highs.data();
    const int64_t first = begin, size = width;  // a lambda takes no structured binding
    parallel_for(rows, threads_for(rows * width, threads), [&](int64_t r) {
      T* to = y + r * outputs + first;
      for_runs(size, [&](int64_t i, int64_t n) {
        store_run(to + i, load_run(to + i, n) + load_run(from + r * size + i, n), n);
      });
    });
    low += rank;
  }
}

// A matrix as a table of addresses holds it: of int8 where it has a scale. Bias and change may be null.
template <class T>
struct Matrix {
  const void* panels;
  const float* scale;
  const T* bias;
  const LowRank* change;
};
template <class T>
void linear(T* y, const T* x, const Matrix<T>& matrix, int64_t rows, int64_t inputs, int64_t outputs,
            int64_t x_stride, int64_t threads) {
  const auto [panels, scale, bias, change] = matrix;
  if (scale)
    linear(y, x, PackedWeight<T, int8_t>{(const int8_t*)panels, scale, bias}, rows, inputs, outputs,
           x_stride, threads);
  else
    linear(y, x, PackedWeight<T, float>{(const float*)panels, nullptr, bias}, rows, inputs, outputs,
           x_stride, threads);
  if (change) add_low_rank(y, x, *change, rows, inputs, outputs, x_stride, threads);
}
