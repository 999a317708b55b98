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

// Writes panel after panel: value(o, i) is asked for where there is an output o and an input i.
template <class T, class F>
void fill_int8_panels(int8_t* packed, int64_t inputs, int64_t outputs, int64_t threads, F value) {
  const Int8Panels<T> panels(inputs);
  parallel_for(ceil_of(outputs, PANEL), threads_for(inputs * outputs, threads), [&](int64_t p) {
    int8_t* to = packed + p * panels.words * PANEL * PER_WORD<T>;
    for (int64_t k = 0; k < panels.words; k++)
      for (int64_t j = 0; j < PANEL; j++)
        for (int64_t h = 0; h < PER_WORD<T>; h++) {
          const int64_t o = p * PANEL + j, i = k * PER_WORD<T> + h;
          *to++ = o < outputs && i < inputs ? value(o, i) : 0;
        }
  });
}

template <class T>
void pack_int8(int8_t* packed, const int8_t* weight, int64_t inputs, int64_t outputs,
               int64_t threads) {
  fill_int8_panels<T>(packed, inputs, outputs, threads,
                      [&](int64_t o, int64_t i) { return weight[o * inputs + i]; });
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
  const Int8Panels<T> panels(inputs);
  fill_int8_panels<T>(columns, outputs, inputs, threads,
                      [&](int64_t i, int64_t o) { return packed[panels.place(o, i)]; });
}
