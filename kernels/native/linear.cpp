// y = x . weight^T + bias over a packed weight, any number of rows.
//
// A weight lies in panels of 48 outputs, [panels][inputs][48] (bf16: pairs of inputs, as the
// processor's dot product takes them), so that one panel is read once, in order, for a tile of 8
// rows. A result is summed over the inputs in order: it has the same bits whatever rows come with
// it. Few rows are bound by the reading of the weight, many by the multiply-adds.
#include "parallel.h"
#include "vector.h"

namespace {

constexpr int PANEL_VECS = 3, PANEL = PANEL_VECS * LANES;
constexpr int TILE_ROWS = 8;         // 8 x 3 sums, 3 weights and 1 input in 32 registers
constexpr int64_t BLOCK_ROWS = 64;   // of a thread's share
constexpr int64_t AHEAD_BYTES = 3072;  // of a weight, asked of memory

// How many inputs a 32-bit word holds, and one step of the sum over them.
template <class T>
constexpr int PER_WORD = 4 / sizeof(T);

inline void multiply_add(Vec& sum, Vec weights, Vec input, float) { sum += weights * input; }
inline void multiply_add(Vec& sum, Vec weights, Vec input, bf16) {
#ifdef __AVX512BF16__
  sum = (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)input);
#else
  sum += as_floats(as_bits(weights) << 16) * as_floats(as_bits(input) << 16);
  sum += as_floats(as_bits(weights) & 0xffff0000u) * as_floats(as_bits(input) & 0xffff0000u);
#endif
}

// R rows of x, one panel. Words of x and of the weight, whatever they hold, are moved as floats.
template <int R, class T>
void multiply_panel(T* y, int64_t y_stride, int64_t num_columns, const T* x, int64_t x_stride,
                    const float* panel, int64_t num_words, const T* bias) {
  Vec sum[R][PANEL_VECS] = {};
  const float* words[R];
  for (int r = 0; r < R; r++) words[r] = (const float*)(x + r * x_stride);
  for (int64_t k = 0; k < num_words; k++) {
    const float* row = panel + k * PANEL;
    Vec w[PANEL_VECS];
    for (int c = 0; c < PANEL_VECS; c++) {
      __builtin_prefetch((const char*)(row + c * LANES) + AHEAD_BYTES);
      w[c] = load(row + c * LANES);
    }
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

template <int R, class T>
void multiply_rows(int64_t num_rows, T* y, int64_t y_stride, int64_t num_columns, const T* x,
                   int64_t x_stride, const float* panel, int64_t num_words, const T* bias) {
  for (; num_rows >= R; num_rows -= R, x += R * x_stride, y += R * y_stride)
    multiply_panel<R>(y, y_stride, num_columns, x, x_stride, panel, num_words, bias);
  if constexpr (R > 1)
    if (num_rows)
      multiply_rows<R - 1>(num_rows, y, y_stride, num_columns, x, x_stride, panel, num_words,
                           bias);
}

// `inputs` is a multiple of PER_WORD (the caller pads x where it is not).
template <class T>
void linear(T* y, const T* x, const float* packed, const T* bias, int64_t rows, int64_t inputs,
            int64_t outputs, int64_t x_stride, int64_t threads) {
  const int64_t words = inputs / PER_WORD<T>;
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
  const int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  // a panel meets all of a thread's rows before the next one: it is read from memory once
  parallel_for(panels * blocks, threads, [&](int64_t i) {
    int64_t p = i / blocks, first = i % blocks * BLOCK_ROWS;
    int64_t n = rows - first < BLOCK_ROWS ? rows - first : BLOCK_ROWS;
    multiply_rows<TILE_ROWS>(n, y + first * outputs + p * PANEL, outputs, outputs - p * PANEL,
                             x + first * x_stride, x_stride, packed + p * words * PANEL, words,
                             bias ? bias + p * PANEL : nullptr);
  });
}

template <class T>
void pack(float* packed, const T* weight, int64_t inputs, int64_t outputs, int64_t threads) {
  constexpr int64_t per_word = PER_WORD<T>;
  const int64_t words = (inputs + per_word - 1) / per_word;
  parallel_for((outputs + PANEL - 1) / PANEL, threads, [&](int64_t p) {
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

}  // namespace

// Whether these are the fastest there are for the processor this was compiled for. Processors with
// matrix units (AMX) multiply bf16 several times faster through oneDNN.
extern "C" int64_t has_linear_f32() {
#ifdef __AVX512F__
  return 1;
#else
  return 0;
#endif
}
extern "C" int64_t has_linear_bf16() {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  return 1;
#else
  return 0;
#endif
}

#define LINEAR(T, SUFFIX)                                                                        \
  extern "C" void linear_##SUFFIX(T* y, const T* x, const float* packed, const T* bias,         \
                                  int64_t rows, int64_t inputs, int64_t outputs,                 \
                                  int64_t x_stride, int64_t threads) {                           \
    linear(y, x, packed, bias, rows, inputs, outputs, x_stride, threads);                        \
  }                                                                                              \
  extern "C" void pack_##SUFFIX(float* packed, const T* weight, int64_t inputs,                 \
                                int64_t outputs, int64_t threads) {                              \
    pack(packed, weight, inputs, outputs, threads);                                              \
  }

LINEAR(float, f32)
LINEAR(bf16, bf16)
