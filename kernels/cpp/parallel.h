// Work shared among threads. Each item is computed by one thread alone, so their number and the
// order of items change no bits. PyTorch's OpenMP runtime is the one already in the process.
#pragma once

#include <cstdint>

// Below so many elements one thread is done before a second has started.
constexpr int64_t WORTH_A_THREAD = 1 << 15;
inline int64_t threads_for(int64_t num_elements, int64_t threads) {
  return num_elements >= WORTH_A_THREAD ? threads : 1;
}

template <class F>
inline void parallel_for(int64_t num_items, int64_t num_threads, F f) {
  if (num_threads <= 1 || num_items <= 1) {
    for (int64_t i = 0; i < num_items; i++) f(i);
    return;
  }
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t i = 0; i < num_items; i++) f(i);
}

// For items of unlike cost.
template <class F>
inline void parallel_for_uneven(int64_t num_items, int64_t num_threads, F f) {
  if (num_threads <= 1 || num_items <= 1) {
    for (int64_t i = 0; i < num_items; i++) f(i);
    return;
  }
#pragma omp parallel for num_threads(num_threads) schedule(dynamic)
  for (int64_t i = 0; i < num_items; i++) f(i);
}
