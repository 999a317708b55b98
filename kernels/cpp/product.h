// Products that sum over rows: a^T . b for the gradient of a weight, and the layout in which a weight
// multiplies the gradient of its output (dx = dy . weight is linear.h's product over it).
//
// Both factors lie in panels of columns, [panels][words][PANEL], a word holding what linear.h's
// multiply-add takes at once: one fp32, or the bf16 of two neighbouring rows. So a pack is an
// interleaving of rows, read and written in order.
//
// The sum goes through fixed chunks of rows, each in order in fp32 and then added to the total: the
// bits do not depend on the threads, and the error is that of short sums.
#pragma once

#include "linear.h"

constexpr int64_t CHUNK_WORDS = 512;  // of a sum: a chunk of two panels stays in a core's cache
constexpr int64_t PACKED_AT_ONCE = 8;  // words: their rows stay in the cache while they are read

// Word k of one panel of x [rows, columns], from column `column` on; zeros where there is nothing. A
// `Word` of fp32 widens bf16.
template <class Word, class T>
void pack_word(float* to, const T* x, int64_t rows, int64_t columns, int64_t stride,
               int64_t column, int64_t k) {
  constexpr int64_t per_word = 4 / sizeof(Word);
  const T* row = x + k * per_word * stride + column;
  const int64_t num_rows = rows - k * per_word;  // from this one on
  for (int64_t c = 0; c < PANEL; c += LANES) {
    const int64_t n = std::min<int64_t>(LANES, columns - column - c);
    if (n <= 0 || num_rows <= 0)
      store(to + c, Vec{});
    else if constexpr (per_word == 1)
      store(to + c, load_run(row + c, n));
    else {  // a bf16 is the upper half of its fp32
      BitsVec low = as_bits(load_run(row + c, n)) >> 16;
      BitsVec high = num_rows > 1 ? as_bits(load_run(row + stride + c, n)) : BitsVec{};
      store(to + c, as_floats(low | high));
    }
  }
}

// Task `task` of packing x: some words of every panel, so that rows are read in order.
template <class Word, class T>
void pack_task(float* packed, const T* x, int64_t rows, int64_t columns, int64_t stride,
               int64_t words, int64_t task) {
  const int64_t from = task * PACKED_AT_ONCE, end = std::min(from + PACKED_AT_ONCE, words);
  for (int64_t column = 0; column < columns; column += PANEL, packed += words * PANEL)
    for (int64_t k = from; k < end; k++)
      pack_word<Word>(packed + k * PANEL, x, rows, columns, stride, column, k);
}

// A weight [inputs of this product, outputs] for linear(): its rows are summed over.
template <class T>
void pack_columns(float* packed, const T* weight, int64_t rows, int64_t columns, int64_t stride,
                  int64_t threads) {
  const int64_t words = ceil_of(rows, PER_PACKED_WORD<T>);
  parallel_for(ceil_of(words, PACKED_AT_ONCE), threads_for(rows * columns, threads), [&](int64_t i) {
    pack_task<T>(packed, weight, rows, columns, stride, words, i);
  });
}

// total[r][..] += a^T . b for R columns of a's panel and a whole panel of b.
template <int R, class T>
void add_panel(float* total, int64_t stride, int64_t num_columns, const float* a, const float* b,
               int64_t num_words) {
  Vec sum[R][PANEL_VECS] = {};
  const float* columns[R];
  for (int r = 0; r < R; r++) columns[r] = a + r;
  sum_words<R, PANEL_VECS, 0, PANEL, T>(sum, columns, b, num_words, nullptr);
  for (int c = 0; c < PANEL_VECS; c++) {
    const int64_t n = std::min<int64_t>(LANES, num_columns - c * LANES);
    if (n <= 0) break;
    for (int r = 0; r < R; r++) {
      float* to = total + r * stride + c * LANES;
      store_run(to, load_run(to, n) + sum[r][c], n);
    }
  }
}

// total [m, n] += a^T . b, of a [rows, m] and b [rows, n].
template <class T>
void add_product(float* total, const T* a, const T* b, int64_t rows, int64_t m, int64_t n,
                 int64_t a_stride, int64_t b_stride, int64_t total_stride, int64_t threads) {
  constexpr int64_t per_word = PER_PACKED_WORD<T>, terms = TERMS<T>;
  thread_local std::vector<float> a_words, b_words;  // of the calling thread, kept as in linear()
  const int64_t a_panels = ceil_of(m, PANEL), b_panels = ceil_of(n, PANEL);
  const int64_t num_threads = threads_for(m * n * ceil_of(rows, READ_ROWS), threads);
  for (int64_t lo = 0; lo < rows; lo += CHUNK_WORDS * per_word) {
    const int64_t num_rows = std::min(CHUNK_WORDS * per_word, rows - lo);
    const int64_t words = ceil_of(num_rows, per_word), steps = words * terms;
    a_words.resize(a_panels * steps * PANEL), b_words.resize(b_panels * words * PANEL);
    float *a_to = a_words.data(), *b_to = b_words.data();
    const int64_t a_tasks = ceil_of(steps, PACKED_AT_ONCE);
    parallel_for(a_tasks + ceil_of(words, PACKED_AT_ONCE), num_threads, [&](int64_t i) {
      if (i < a_tasks)
        pack_task<Input<T>>(a_to, a + lo * a_stride, num_rows, m, a_stride, steps, i);
      else
        pack_task<T>(b_to, b + lo * b_stride, num_rows, n, b_stride, words, i - a_tasks);
    });
    // the panels of the smaller factor pass by those of the larger one
    parallel_for(a_panels * b_panels, num_threads, [&](int64_t task) {
      const bool is_by_a = b_panels <= a_panels;
      const int64_t i = is_by_a ? task / b_panels : task % a_panels;
      const int64_t j = is_by_a ? task % b_panels : task / a_panels;
      const int64_t height = std::min<int64_t>(PANEL, m - i * PANEL);
      by_rows<TILE_ROWS>(height, [&](int64_t r, auto R) {
        add_panel<R, T>(total + (i * PANEL + r) * total_stride + j * PANEL, total_stride,
                        n - j * PANEL, a_to + i * steps * PANEL + r, b_to + j * words * PANEL, words);
      });
    });
  }
}
