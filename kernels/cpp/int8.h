// Weights of int8 for linear.h's product: packed, back, and turned round for the gradient of the input.
//
// Value i of output o lies in panel o / PANEL, which holds for each word of PER_WORD inputs those of
// all its outputs, [panels][words][PANEL][PER_WORD]; where there is no output or input, zeros.
#pragma once

#include "linear.h"

// The place of inputs in panels of `inputs` inputs.
template <class T>
struct Int8Panels {
  int64_t words;
  explicit Int8Panels(int64_t inputs) : words(ceil_of(inputs, PER_WORD<T>)) {}
  int64_t place(int64_t output, int64_t input) const {
    const int64_t word = output / PANEL * words + input / PER_WORD<T>;
    return (word * PANEL + output % PANEL) * PER_WORD<T> + input % PER_WORD<T>;
  }
};

template <class T>
void pack_int8(int8_t* packed, const int8_t* weight, int64_t inputs, int64_t outputs,
               int64_t threads) {
  const Int8Panels<T> panels(inputs);
  parallel_for(ceil_of(outputs, PANEL), threads_for(inputs * outputs, threads), [&](int64_t p) {
    int8_t* to = packed + p * panels.words * PANEL * PER_WORD<T>;
    memset(to, 0, panels.words * PANEL * PER_WORD<T>);
    for (int64_t o = p * PANEL; o < std::min(outputs, (p + 1) * PANEL); o++)
      for (int64_t i = 0; i < inputs; i++) packed[panels.place(o, i)] = weight[o * inputs + i];
  });
}

// The weight [outputs, inputs] that was packed.
template <class T>
void unpack_int8(int8_t* weight, const int8_t* packed, int64_t inputs, int64_t outputs,
                 int64_t threads) {
  const Int8Panels<T> panels(inputs);
  parallel_for(outputs, threads_for(inputs * outputs, threads), [&](int64_t o) {
    for (int64_t i = 0; i < inputs; i++) weight[o * inputs + i] = packed[panels.place(o, i)];
  });
}

// The panels of the transposed weight, whose outputs are the inputs of this one.
template <class T>
void transpose_int8(int8_t* columns, const int8_t* packed, int64_t inputs, int64_t outputs,
                    int64_t threads) {
  constexpr int64_t per_word = PER_WORD<T>, step = PANEL * per_word;
  const Int8Panels<T> panels(inputs);
  const int64_t words = ceil_of(outputs, per_word);
  parallel_for(ceil_of(inputs, PANEL), threads_for(inputs * outputs, threads), [&](int64_t p) {
    const int64_t num_inputs = std::min<int64_t>(PANEL, inputs - p * PANEL);
    int8_t* to = columns + p * words * step;
    memset(to, 0, words * step);
    for (int64_t o = 0; o < outputs; o++) {
      const int8_t* from = packed + panels.place(o, p * PANEL);
      int8_t* row = to + o / per_word * step + o % per_word;
      for (int64_t j = 0; j < num_inputs; j++)
        row[j * per_word] = from[j / per_word * step + j % per_word];
    }
  });
}
