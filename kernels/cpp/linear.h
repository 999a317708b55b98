// y = (x . weight^T) * scale + bias over a packed weight, any number of rows.
//
// A weight lies in panels of outputs, [panels][inputs][PANEL] (bf16: pairs of inputs, as AVX-512's
// dot product takes them), so that one panel is read once, in order, for a tile of rows. A result is
// summed over the inputs in order: it has the same bits whatever rows come with it, and however the
// work is cut. Few rows are bound by the reading of the weight, many by the multiply-adds.
//
// A panel holds words of x's type, or int8 (int8.h packs it): half the bytes of bf16. Those are widened
// to what is multiplied, which is exact, and their sums are multiplied by the scale of each output.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "vector.h"

// A tile's sums, the weights of a panel and an input fit the registers: 8 x 3 + 3 + 1 of 32, 6 x 2 +
// 2 + 1 of 16.
constexpr int PANEL_VECS = REGISTERS == 32 ? 3 : 2, PANEL = PANEL_VECS * LANES;
constexpr int TILE_ROWS = REGISTERS == 32 ? 8 : 6;
constexpr int64_t READ_ROWS = 32;  // that a weight meets in the time it takes to read it
constexpr int64_t BLOCK_ROWS = 64 / TILE_ROWS * TILE_ROWS;  // of a panel's task
constexpr int NEAR = 32;           // steps of a sum from the weights in use to those asked for
constexpr int LINE = LINE_BYTES / 4, PANEL_LINES = (PANEL + LINE - 1) / LINE;  // of 32-bit words

template <class T>
constexpr int PER_PACKED_WORD = 4 / sizeof(T);
// Of a panel of P's, floats that hold words or int8: P's in one output's word, inputs in it, terms of
// the sum in it, lines of the processor's cache that a panel takes for a word of each output.
template <class T, class P>
constexpr int WORD_SIZE = sizeof(P) == 1 ? PER_WORD<T> : 1;
template <class T, class P>
constexpr int WORD_INPUTS = sizeof(P) == 1 ? PER_WORD<T> : PER_PACKED_WORD<T>;
template <class T, class P>
constexpr int WORD_TERMS = sizeof(P) == 1 ? 1 : TERMS<T>;
template <class T, class P>
constexpr int WORD_LINES =
    sizeof(P) == 1 ? (PANEL * PER_WORD<T> + LINE_BYTES - 1) / LINE_BYTES : PANEL_LINES;
// What x is read as: words of it, or the elements widened.
template <class T>
using Input = std::conditional_t<IS_WIDENED<T>, float, T>;

// Term h of the words at p of LANES outputs.
template <class T>
inline Vec load_term(const float* p, int h) {
  return term<T>(load(p), h);
}
template <class T>
inline Vec load_term(const int8_t* p, int) {
  return widen_words<T>(p);
}

// sum += R rows of words times VECS vectors of a panel. Words of both factors, whatever they hold, are
// moved as floats; those of a row lie STEP floats apart. Meanwhile asks memory for what lies at
// `ahead`, ASK lines with each step of the sum.
template <int R, int VECS, int ASK, int STEP, class T, class P>
inline void sum_words(Vec (&sum)[R][VECS], const float* const (&rows)[R], const P* panel,
                      int64_t num_words, const char* ahead) {
  constexpr int lines = VECS == PANEL_VECS ? WORD_LINES<T, P> : 1;
  constexpr int size = WORD_SIZE<T, P>, terms = WORD_TERMS<T, P>;
  for (int64_t k = 0; k < num_words; k++) {
    const P* row = panel + k * PANEL * size;
    for (int i = 0; i < lines; i++)
      __builtin_prefetch((const char*)(row + NEAR * PANEL * size) + i * LINE_BYTES);
    for (int a = 0; a < ASK; a++) __builtin_prefetch(ahead + (k * ASK + a) * LINE_BYTES, 0, 2);
    for (int h = 0; h < terms; h++) {
      Vec w[VECS];
      for (int c = 0; c < VECS; c++) w[c] = load_term<T>(row + c * LANES * size, h);
      for (int r = 0; r < R; r++) {
        Vec input = splat_word(rows[r] + (k * terms + h) * STEP);
        for (int c = 0; c < VECS; c++) multiply_add(sum[r][c], w[c], input, T());
      }
    }
  }
}

// R rows of x, VECS vectors of a panel's outputs. `scale` and `bias` may be null.
template <int R, int VECS, int ASK, class T, class P>
void multiply_panel(T* y, int64_t y_stride, int64_t num_columns, const Input<T>* x,
                    int64_t x_stride, const P* panel, int64_t num_words, const float* scale,
                    const T* bias, const char* ahead) {
  Vec sum[R][VECS] = {};
  const float* words[R];
  for (int r = 0; r < R; r++) words[r] = (const float*)(x + r * x_stride);
  sum_words<R, VECS, ASK, 1, T>(sum, words, panel, num_words, ahead);
  for (int c = 0; c < VECS; c++) {
    int64_t n = num_columns - c * LANES;
    if (n <= 0) break;
    if (n > LANES) n = LANES;
    Vec s = scale ? load_run(scale + c * LANES, n) : splat(1.0f);
    Vec b = bias ? load_run(bias + c * LANES, n) : Vec{};
    for (int r = 0; r < R; r++) store_run(y + r * y_stride + c * LANES, sum[r][c] * s + b, n);
  }
}

// The kernel for `rows` of at most R rows.
template <int R, int VECS, int ASK, class T, class P>
auto panel_kernel(int64_t rows) {
  if constexpr (R > 1)
    if (rows < R) return panel_kernel<R - 1, VECS, ASK, T, P>(rows);
  return multiply_panel<R, VECS, ASK, T, P>;
}

// The kernel that asks for `ask` of at most ASK lines.
template <int ASK, class T, class P>
auto asking_kernel(int64_t rows, int64_t ask) {
  if constexpr (ASK > 0)
    if (ask < ASK) return asking_kernel<ASK - 1, T, P>(rows, ask);
  return panel_kernel<TILE_ROWS, PANEL_VECS, ASK, T, P>(rows);
}

// How the work is cut into tasks, each of which one thread does: so many vectors of outputs (a panel
// or one vector) by so many rows.
struct Cut {
  int64_t vecs, rows;
};

inline int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t num_tasks(Cut cut, int64_t rows, int64_t outputs) {
  return ceil_of(outputs, cut.vecs * LANES) * ceil_of(rows, cut.rows);
}
// What the busiest thread computes, in vectors x rows.
inline int64_t largest_share(Cut cut, int64_t rows, int64_t outputs, int64_t threads) {
  return ceil_of(num_tasks(cut, rows, outputs), threads) * cut.vecs *
         std::min(cut.rows, rows);
}

// The coarsest cut that keeps the threads busy to within an eighth, else the evenest. A matrix of
// 576 outputs has 12 panels of 48: without a finer cut 16 threads are no faster than 12. Fine cuts
// cost a little: a weight is read for each block of rows, an input for each vector.
inline Cut choose_cut(int64_t rows, int64_t outputs, int64_t threads) {
  Cut best{PANEL_VECS, BLOCK_ROWS};
  int64_t least = largest_share(best, rows, outputs, threads);
  const int64_t ideal = ceil_of(outputs, LANES) * rows;
  for (int64_t block = BLOCK_ROWS; block >= TILE_ROWS; block = block / 2 / TILE_ROWS * TILE_ROWS)
    for (int64_t vecs : {(int64_t)PANEL_VECS, (int64_t)1}) {
      Cut cut{vecs, block};
      int64_t share = largest_share(cut, rows, outputs, threads);
      if (share < least) best = cut, least = share;
      if (8 * least * threads <= 9 * ideal) return best;
    }
  return best;
}

// What a task computes: rows row..end of the outputs from `column` on.
struct Block {
  int64_t row, end, column, num_columns;
};
inline Block block_of(int64_t task, Cut cut, int64_t rows, int64_t outputs) {
  const int64_t blocks = ceil_of(rows, cut.rows), width = cut.vecs * LANES;
  const int64_t row = task % blocks * cut.rows, column = task / blocks * width;
  return {row, std::min(row + cut.rows, rows), column, std::min(width, outputs - column)};
}

// A weight as products read it: panels, the scales of int8 (else null), bias (may be null).
template <class T, class P>
struct PackedWeight {
  const P* panels;
  const float* scale;
  const T* bias;
};

template <class T, class P>
void multiply_task(T* y, const Input<T>* x, const PackedWeight<T, P>& weight, int64_t rows,
                   int64_t outputs, int64_t words, int64_t x_stride, Cut cut, int64_t task) {
  const auto [row, end, column, num_columns] = block_of(task, cut, rows, outputs);
  const int64_t panel_size = words * PANEL * WORD_SIZE<T, P>;
  const P* panel = weight.panels + column / PANEL * panel_size + column % PANEL * WORD_SIZE<T, P>;
  // A panel meets all rows before the next one, so it is read from memory once, and while it is
  // multiplied the next one is on its way: shared out among the tiles of the first block of rows.
  const int64_t first_tiles = ceil_of(std::min(rows, cut.rows), TILE_ROWS);
  const int64_t ask = ceil_of(WORD_LINES<T, P>, first_tiles);
  // Tiles of like height: 5 and 4 rows are quicker than 8 and a last one, whose few sums would wait
  // for one another.
  const int64_t height = ceil_of(end - row, ceil_of(end - row, TILE_ROWS));
  const bool has_next = cut.vecs == PANEL_VECS && row == 0 && column + PANEL < outputs;
  const char* ahead = (const char*)(panel + panel_size);
  const char* ahead_end = has_next ? (const char*)(panel + 2 * panel_size) : ahead;
  for (int64_t r = row; r < end; r += height) {
    const int64_t num_rows = std::min(end - r, height);
    auto kernel =
        cut.vecs < PANEL_VECS
            ? panel_kernel<TILE_ROWS, 1, 0, T, P>(num_rows)
            : asking_kernel<WORD_LINES<T, P>, T, P>(num_rows, ahead < ahead_end ? ask : 0);
    kernel(y + r * outputs + column, outputs, num_columns, x + r * x_stride, x_stride, panel, words,
           weight.scale ? weight.scale + column : nullptr,
           weight.bias ? weight.bias + column : nullptr, ahead);
    ahead += ask * words * LINE_BYTES;
  }
}

// `inputs` is a multiple of PER_PACKED_WORD (the caller pads x where it is not).
template <class T, class P>
void linear(T* y, const T* x, const PackedWeight<T, P>& weight, int64_t rows, int64_t inputs,
            int64_t outputs, int64_t x_stride, int64_t threads) {
  if (rows == 0) return;
  const int64_t words = inputs / WORD_INPUTS<T, P>;
  const int64_t work = outputs * words * (rows < READ_ROWS ? 1 : rows / READ_ROWS);
  const int64_t num_threads = threads_for(work, threads);
  const Cut cut = choose_cut(rows, outputs, num_threads);
  const Input<T>* input;
  if constexpr (IS_WIDENED<T>) {
    thread_local std::vector<float> widened;  // of the calling thread, kept: fresh pages are slow
    widened.resize(rows * inputs);
    float* to = widened.data();
    parallel_for(rows, threads_for(rows * inputs, threads),
                 [&](int64_t r) { copy_words(to + r * inputs, x + r * x_stride, inputs); });
    input = to, x_stride = inputs;
  } else {
    input = x;
  }
  parallel_for(num_tasks(cut, rows, outputs), num_threads, [&](int64_t task) {
    multiply_task(y, input, weight, rows, outputs, words, x_stride, cut, task);
  });
}

template <class T>
void pack(float* packed, const T* weight, int64_t inputs, int64_t outputs, int64_t threads) {
  constexpr int64_t per_word = PER_PACKED_WORD<T>;
  const int64_t words = (inputs + per_word - 1) / per_word;
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
  parallel_for(panels, threads_for(inputs * outputs, threads), [&](int64_t p) {
    float* to = packed + p * words * PANEL;
    // Rows are read a line at a time, all of a panel's by turns, and written likewise, neither of which
    // the processor foresees: asks for the next panel's rows, which have as many lines, one after the
    // other, and for where the next words go.
    const char* ahead = (const char*)(weight + std::min((p + 1) * PANEL, outputs) * inputs);
    const char* end = (const char*)(weight + std::min((p + 2) * PANEL, outputs) * inputs);
    for (int64_t k = 0; k < words; k += LANES)
      for (int64_t c = 0; c < PANEL; c += LANES) {
        BitsVec x[LANES] = {};
        for (int64_t j = 0; j < LANES; j++, ahead += 4 * LANES) {
          int64_t out = p * PANEL + c + j, in = k * per_word;
          if (ahead < end) __builtin_prefetch(ahead, 0, 2);
          if (k + LANES + j < words) __builtin_prefetch(to + (k + LANES + j) * PANEL + c, 1);
          if (out < outputs) x[j] = load_words(weight + out * inputs + in, inputs - in);
        }
        transpose(x);
        for (int64_t j = 0; j < LANES && k + j < words; j++)
          store(to + (k + j) * PANEL + c, as_floats(x[j]));
      }
  });
}

// The same product over a weight as it is, [outputs, inputs], for rows that are many: what laying it
// out takes, they take many times.
template <class T>
void linear_unpacked(T* y, const T* x, const T* weight, const T* bias, int64_t rows, int64_t inputs,
                     int64_t outputs, int64_t x_stride, int64_t threads) {
  thread_local std::vector<float> packed;  // of the calling thread, kept as in linear()
  packed.resize(ceil_of(outputs, PANEL) * ceil_of(inputs, PER_PACKED_WORD<T>) * PANEL + LINE);
  const uintptr_t begin = ((uintptr_t)packed.data() + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
  pack((float*)begin, weight, inputs, outputs, threads);
  const PackedWeight<T, float> laid_out{(const float*)begin, nullptr, bias};
  linear(y, x, laid_out, rows, inputs, outputs, x_stride, threads);
}
