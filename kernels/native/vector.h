// Sixteen floats as one value, in the compiler's own vector type: one source for AVX-512, AVX2 and
// NEON. Loads widen bf16 to fp32, stores round to nearest even.
//
// What makes results reproducible: lane i of a sum holds the terms i, i + 16, i + 32, ... in
// order, and lanes are added as a fixed tree. Nothing depends on how many rows there are, how they
// are shared among threads or where in memory they lie.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

constexpr int LANES = 16;
typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef uint32_t BitsVec __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * LANES)));

struct bf16 {
  uint16_t bits;
};

inline Vec splat(float x) { return Vec{} + x; }
inline Vec as_floats(BitsVec x) { return (Vec)x; }
inline BitsVec as_bits(Vec x) { return (BitsVec)x; }
inline Vec choose(IntVec mask, Vec yes, Vec no) {
  return (Vec)(((IntVec)yes & mask) | ((IntVec)no & ~mask));
}
inline Vec larger(Vec a, Vec b) { return choose(a > b, a, b); }

// All lanes hold the 32 bits at p, whatever they mean.
inline Vec splat_word(const float* p) {
  uint32_t word;
  memcpy(&word, p, sizeof word);
  return as_floats(BitsVec{} + word);
}

inline Vec load(const float* p) {
  Vec x;
  memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, Vec x) { memcpy(p, &x, sizeof x); }

// One instruction each on AVX-512, where gcc 12 makes five of __builtin_convertvector.
inline BitsVec widen(HalfVec x) {
#ifdef __AVX512F__
  return (BitsVec)_mm512_cvtepu16_epi32((__m256i)x);
#else
  return __builtin_convertvector(x, BitsVec);
#endif
}
inline HalfVec narrow(BitsVec x) {
#ifdef __AVX512F__
  return (HalfVec)_mm512_cvtepi32_epi16((__m512i)x);
#else
  return __builtin_convertvector(x, HalfVec);
#endif
}

inline Vec load(const bf16* p) {
  HalfVec half;
  memcpy(&half, p, sizeof half);
  return as_floats(widen(half) << 16);
}
inline void store(bf16* p, Vec x) {
  BitsVec bits = as_bits(x);
  BitsVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  BitsVec nan = (BitsVec)(x != x);
  HalfVec half = narrow((rounded & ~nan) | (nan & 0x7fc0));
  memcpy(p, &half, sizeof half);
}

// The first n < LANES elements; the other lanes are zero, and are not written.
template <class T>
inline Vec load_part(const T* p, int64_t n) {
  T padded[LANES] = {};
  memcpy(padded, p, n * sizeof(T));
  return load(padded);
}
template <class T>
inline void store_part(T* p, Vec x, int64_t n) {
  T padded[LANES];
  store(padded, x);
  memcpy(p, padded, n * sizeof(T));
}

// f(i, n) for each run of n <= LANES elements.
template <class F>
inline void for_runs(int64_t size, F f) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) f(i, (int64_t)LANES);
  if (i < size) f(i, size - i);
}
template <class T>
inline Vec load_run(const T* p, int64_t n) {
  return n == LANES ? load(p) : load_part(p, n);
}
template <class T>
inline void store_run(T* p, Vec x, int64_t n) {
  n == LANES ? store(p, x) : store_part(p, x, n);
}

inline float sum_lanes(Vec x) {
  float lane[LANES];
  store(lane, x);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lane[i] += lane[i + width];
  return lane[0];
}
inline float max_lanes(Vec x) {
  float lane[LANES];
  store(lane, x);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
  return lane[0];
}

// e^x within 2 units in the last place; 0 below -87.3, where fp32 has no normal number; inf above
// 88.7; NaN stays. Cody and Waite's reduction, Cephes' polynomial.
inline Vec exp(Vec x) {
  const Vec low = splat(-87.33654f), high = splat(88.72283f);
  Vec clamped = choose(x < low, low, choose(x > high, high, x));
  const Vec round = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec n = (clamped * splat(1.44269504f) + round) - round;
  Vec r = clamped - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  Vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  IntVec exponent = __builtin_convertvector(n, IntVec);
  // in two steps: 2^128 is no number, but e^88.7 is
  IntVec half = exponent >> 1;
  p = p * (Vec)((half + 127) << 23) * (Vec)((exponent - half + 127) << 23);
  p = choose(x < low, splat(0.0f), p);
  p = choose(x > high, splat(INFINITY), p);
  return choose(x == x, p, x);
}

template <int D>
inline void swap_blocks(BitsVec& a, BitsVec& b) {
  constexpr auto from = [](int i, bool high) {
    return high ? ((i & D) ? i + LANES : i + D) : ((i & D) ? i + LANES - D : i);
  };
  BitsVec low = __builtin_shufflevector(
      a, b, from(0, 0), from(1, 0), from(2, 0), from(3, 0), from(4, 0), from(5, 0), from(6, 0),
      from(7, 0), from(8, 0), from(9, 0), from(10, 0), from(11, 0), from(12, 0), from(13, 0),
      from(14, 0), from(15, 0));
  BitsVec high = __builtin_shufflevector(
      a, b, from(0, 1), from(1, 1), from(2, 1), from(3, 1), from(4, 1), from(5, 1), from(6, 1),
      from(7, 1), from(8, 1), from(9, 1), from(10, 1), from(11, 1), from(12, 1), from(13, 1),
      from(14, 1), from(15, 1));
  a = low;
  b = high;
}

template <int D>
inline void swap_all(BitsVec* x) {
  for (int i = 0; i < LANES; i++)
    if (!(i & D)) swap_blocks<D>(x[i], x[i + D]);
}

// Sixteen rows of sixteen 32-bit words.
inline void transpose(BitsVec* x) {
  swap_all<8>(x);
  swap_all<4>(x);
  swap_all<2>(x);
  swap_all<1>(x);
}

// Words of a row, as many as there are; the others zero.
template <class T>
inline BitsVec load_words(const T* p, int64_t num_elements) {
  BitsVec x = {};
  constexpr int64_t most = 4 * LANES / sizeof(T);
  if (num_elements >= most)
    memcpy(&x, p, sizeof x);
  else if (num_elements > 0)
    memcpy(&x, p, num_elements * sizeof(T));
  return x;
}

// Products run over 32-bit words, whatever they hold: one fp32, or two bf16 of which the processor
// takes the dot product at once. Words are moved as floats.
template <class T>
constexpr int PER_WORD = 4 / sizeof(T);

// sum += a . b, word by word.
inline void multiply_add(Vec& sum, Vec a, Vec b, float) { sum += a * b; }
inline void multiply_add(Vec& sum, Vec a, Vec b, bf16) {
#ifdef __AVX512BF16__
  sum = (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  sum += as_floats(as_bits(a) << 16) * as_floats(as_bits(b) << 16);
  sum += as_floats(as_bits(a) & 0xffff0000u) * as_floats(as_bits(b) & 0xffff0000u);
#endif
}
