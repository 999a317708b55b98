// y = x . weight^T + bias over a packed weight, any number of rows.
//
// A weight lies in panels of 48 outputs, [panels][inputs][48] (bf16: pairs of inputs, as the
// processor's dot product takes them), so that one panel is read once, in order, for a tile of 8
// rows. A result is summed over the inputs in order: it has the same bits whatever rows come with
// it. Few rows are bound by the reading of the weight, many by the multiply-adds.
#pragma once

#include "parallel.h"
#include "vector.h"

constexpr int PANEL_VECS = 3, PANEL = PANEL_VECS * LANES;
constexpr int TILE_ROWS = 8;        // 8 x 3 sums, 3 weights and 1 input in 32 registers
constexpr int64_t READ_ROWS = 32;   // that a weight meets in the time it takes to read it
constexpr int64_t BLOCK_ROWS = 64;  // of a thread's share
constexpr int NEAR = 32;            // steps of a sum from the weights in use to those asked for

// R rows of x, one panel. Words of x and of the weight, whatever they hold, are moved as floats.
// Meanwhile asks memory for what lies at `ahead`, ASK vectors with each step of the sum.
template <int R, int ASK, class T>
void multiply_panel(T* y, int64_t y_stride, int64_t num_columns, const T* x, int64_t x_stride,
                    const float* panel, int64_t num_words, const T* bias, const float* ahead) {
  Vec sum[R][PANEL_VECS] = {};
  const float* words[R];
  for (int r = 0; r < R; r++) words[r] = (const float*)(x + r * x_stride);
  for (int64_t k = 0; k < num_words; k++) {
    const float* row = panel + k * PANEL;
    Vec w[PANEL_VECS];
    for (int c = 0; c < PANEL_VECS; c++) {
      __builtin_prefetch(row + (NEAR * PANEL_VECS + c) * LANES);
      w[c] = load(row + c * LANES);
    }
    for (int a = 0; a < ASK; a++) __builtin_prefetch(ahead + (k * ASK + a) * LANES, 0, 2);
    for (int r = 0; r < R; r++) {
      Vec input = splat_word(words[r] + k);
      for (int c = 0; c < PANEL_VECS; c++) multiply_add(sum[r][c], w[c], input, T());
    }
  }
  for (int c = 0; c < PANEL_VECS; c++) {
    int64_t n = num_columns - c * LANES;
    if (n <= 0) break;
    if (n > LANES) n = LANES;
    Vec b = bias ? load_run(bias + c * LANES, n) : Vec{};
    for (int r = 0; r < R; r++) store_run(y + r * y_stride + c * LANES, sum[r][c] + b, n);
  }
}

// The kernel for `rows` of at most R rows.
template <int R, int ASK, class T>
auto panel_kernel(int64_t rows) {
  if constexpr (R > 1)
    if (rows < R) return panel_kernel<R - 1, ASK, T>(rows);
  return multiply_panel<R, ASK, T>;
}

template <class T>
auto panel_kernel(int64_t rows, int64_t ask) {
  return ask == 0   ? panel_kernel<TILE_ROWS, 0, T>(rows)
         : ask == 1 ? panel_kernel<TILE_ROWS, 1, T>(rows)
         : ask == 2 ? panel_kernel<TILE_ROWS, 2, T>(rows)
                    : panel_kernel<TILE_ROWS, 3, T>(rows);
}

// `inputs` is a multiple of PER_WORD (the caller pads x where it is not).
template <class T>
void linear(T* y, const T* x, const float* packed, const T* bias, int64_t rows, int64_t inputs,
            int64_t outputs, int64_t x_stride, int64_t threads) {
  if (rows == 0) return;
  const int64_t words = inputs / PER_WORD<T>;
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
  const int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  // A panel meets all rows before the next one, so it is read from memory once, and while it is
  // multiplied the next one is on its way: shared out among the tiles of the first block of rows.
  const int64_t first_tiles = ((rows < BLOCK_ROWS ? rows : BLOCK_ROWS) + TILE_ROWS - 1) / TILE_ROWS;
  const int64_t ask = first_tiles >= PANEL_VECS ? 1 : (PANEL_VECS + first_tiles - 1) / first_tiles;
  const int64_t work = panels * words * PANEL * (rows < READ_ROWS ? 1 : rows / READ_ROWS);
  parallel_for(panels * blocks, threads_for(work, threads), [&](int64_t i) {
    const int64_t p = i / blocks, block = i % blocks * BLOCK_ROWS;
    const int64_t end = block + BLOCK_ROWS < rows ? block + BLOCK_ROWS : rows;
    const float* panel = packed + p * words * PANEL;
    const float* ahead = panel + words * PANEL;
    const float* ahead_end = p + 1 < panels ? ahead + words * PANEL : ahead;
    for (int64_t r = block; r < end; r += TILE_ROWS) {
      int64_t num_rows = end - r < TILE_ROWS ? end - r : TILE_ROWS;
      bool is_asking = block == 0 && ahead < ahead_end;
      panel_kernel<T>(num_rows, is_asking ? ask : 0)(
          y + r * outputs + p * PANEL, outputs, outputs - p * PANEL, x + r * x_stride, x_stride,
          panel, words, bias ? bias + p * PANEL : nullptr, ahead);
      ahead += ask * words * LANES;
    }
  });
}

template <class T>
void pack(float* packed, const T* weight, int64_t inputs, int64_t outputs, int64_t threads) {
  constexpr int64_t per_word = PER_WORD<T>;
  const int64_t words = (inputs + per_word - 1) / per_word;
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
  parallel_for(panels, threads_for(inputs * outputs, threads), [&](int64_t p) {
    float* to = packed + p * words * PANEL;
    for (int64_t k = 0; k < words; k += LANES)
      for (int64_t c = 0; c < PANEL; c += LANES) {
        BitsVec x[LANES] = {};
        for (int64_t j = 0; j < LANES; j++) {
          int64_t out = p * PANEL + c + j, in = k * per_word;
          if (out < outputs) x[j] = load_words(weight + out * inputs + in, inputs - in);
        }
        transpose(x);
        for (int64_t j = 0; j < LANES && k + j < words; j++)
          store(to + (k + j) * PANEL + c, as_floats(x[j]));
      }
  });
}
