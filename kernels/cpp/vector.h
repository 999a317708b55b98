// As many floats as one register holds, as one value, in the compiler's own vector type: one source
// for AVX-512 (16 lanes), AVX2 (8), SSE and NEON (4). This file alone looks at the instruction set.
// Loads widen bf16 to fp32, stores round to nearest even.
//
// What makes results reproducible: lane i of a sum holds the terms i, i + LANES, i + 2 LANES, ... in
// order, and lanes are added as a fixed tree. Nothing depends on how many rows there are, how they
// are shared among threads or where in memory they lie.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Wider vectors than the processor's would be split through the stack, at a tenth of the speed.
// Tests set both, to run the arithmetic of another processor.
#ifndef VECTOR_LANES
#if defined(__AVX512F__)
#define VECTOR_LANES 16
#elif defined(__AVX2__)
#define VECTOR_LANES 8
#else
#define VECTOR_LANES 4
#endif
#endif
#ifndef VECTOR_REGISTERS
#if defined(__AVX512F__) || defined(__aarch64__)
#define VECTOR_REGISTERS 32
#else
#define VECTOR_REGISTERS 16
#endif
#endif
#if defined(__AVX512F__) && VECTOR_LANES == 16
#define HAS_AVX512 1
#ifdef __AVX512BF16__
#define HAS_BF16_PRODUCT 1
#endif
#endif
constexpr int LANES = VECTOR_LANES, REGISTERS = VECTOR_REGISTERS;
constexpr int LINE_BYTES = 64;  // of the processor's cache
typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef uint32_t BitsVec __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * LANES)));
typedef int8_t ByteVec __attribute__((vector_size(LANES)));

struct bf16 {
  uint16_t bits;
};

inline Vec splat(float x) { return x - Vec{}; }  // 0 + x would be computed: it changes -0
inline Vec as_floats(BitsVec x) { return (Vec)x; }
inline BitsVec as_bits(Vec x) { return (BitsVec)x; }
inline Vec choose(IntVec mask, Vec yes, Vec no) {
  return mask ? yes : no;  // lane by lane; one instruction where masks by bits are three
}
// A mask of the first n lanes.
inline IntVec first_lanes(int64_t n) {
  IntVec lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  return lane < (int32_t)n;
}
inline Vec larger(Vec a, Vec b) { return choose(a > b, a, b); }

// a * b + c, rounded once where the processor can. Written out, and contraction is switched off:
// compilers fuse in some instances of a template and not in others (gcc keeps chains of fused adds
// apart on AMD's processors), so that bits would depend on the size of a tile.
inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(HAS_AVX512)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && VECTOR_LANES == 8
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__) && VECTOR_LANES == 4
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FMA__) || defined(__aarch64__)
  for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

inline Vec square_root(Vec x) {
#if defined(HAS_AVX512)
  return (Vec)_mm512_sqrt_ps((__m512)x);
#else
  for (int i = 0; i < LANES; i++) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

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
#if defined(HAS_AVX512)
  return (BitsVec)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__) && VECTOR_LANES == 8
  return (BitsVec)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, BitsVec);
#endif
}
inline HalfVec narrow(BitsVec x) {
#ifdef HAS_AVX512
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
// Words of two bf16, from low and from high.
inline Vec pair_halves(HalfVec low, HalfVec high) {
  return as_floats(widen(low) | widen(high) << 16);
}

// x rounded to bf16, in the lower half of each lane.
inline BitsVec round_to_bf16(Vec x) {
  BitsVec bits = as_bits(x);
  BitsVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  BitsVec nan = (BitsVec)(x != x);
  return (rounded & ~nan) | (nan & 0x7fc0);
}
inline void store(bf16* p, Vec x) {
  HalfVec half = narrow(round_to_bf16(x));
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

template <class V, class F, int... I>
inline V shuffled(V a, V b, F from, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, from(I)...);
}
// Lane i of the result holds lane from(i) of a, or lane from(i) - LANES of b.
template <class V, class F>
inline V shuffled(V a, V b, F from) {
  return shuffled(a, b, from, std::make_integer_sequence<int, LANES>());
}

// Lane i of the result holds lane i + BY.
template <int BY>
inline Vec shifted(Vec x) {
  return shuffled(x, x, [](int i) { return i + BY; });
}
template <int BY = LANES / 2>
inline float sum_lanes(Vec x) {
  x += shifted<BY>(x);
  if constexpr (BY > 1) return sum_lanes<BY / 2>(x);
  return x[0];
}
template <int BY = LANES / 2>
inline float max_lanes(Vec x) {
  x = larger(x, shifted<BY>(x));
  if constexpr (BY > 1) return max_lanes<BY / 2>(x);
  return x[0];
}

constexpr float LOWEST_EXP = -87.33654f, HIGHEST_EXP = 88.72283f;  // what has a normal number

// p of e^x = p * 2^exponent, of an x between them. Cody and Waite's reduction, Cephes' polynomial.
inline Vec exp_parts(Vec x, IntVec& exponent) {
  const Vec round = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec n = fused(x, splat(1.44269504f), round) - round;
  Vec r = fused(n, splat(-0.693359375f), x);
  r = fused(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fused(p, r, splat(1.3981999507e-3f));
  p = fused(p, r, splat(8.3334519073e-3f));
  p = fused(p, r, splat(4.1665795894e-2f));
  p = fused(p, r, splat(1.6666665459e-1f));
  p = fused(p, r, splat(5.0000001201e-1f));
  exponent = __builtin_convertvector(n, IntVec);
  return fused(p * r, r, r) + splat(1.0f);
}

// e^x within 2 units in the last place; 0 below -87.3, where fp32 has no normal number; inf above
// 88.7; NaN stays.
inline Vec exp(Vec x) {
  const Vec low = splat(LOWEST_EXP), high = splat(HIGHEST_EXP);
  IntVec exponent;
  Vec p = exp_parts(choose(x < low, low, choose(x > high, high, x)), exponent);
  // in two steps: 2^128 is no number, but e^88.7 is
  IntVec half = exponent >> 1;
  p = p * (Vec)((half + 127) << 23) * (Vec)((exponent - half + 127) << 23);
  p = choose(x < low, splat(0.0f), p);
  p = choose(x > high, splat(INFINITY), p);
  return choose(x == x, p, x);
}

// The same of x up to 0, which softmax takes, for fewer instructions.
inline Vec exp_below(Vec x) {
  const Vec low = splat(LOWEST_EXP);
  IntVec exponent;
  Vec p = exp_parts(choose(x < low, low, x), exponent);
  return choose(x < low, splat(0.0f), p * (Vec)((exponent + 127) << 23));
}

template <int D>
inline void swap_blocks(BitsVec& a, BitsVec& b) {
  BitsVec low = shuffled(a, b, [](int i) { return (i & D) ? i + LANES - D : i; });
  b = shuffled(a, b, [](int i) { return (i & D) ? i + LANES : i + D; });
  a = low;
}

// LANES rows of LANES 32-bit words.
template <int D = LANES / 2>
inline void transpose(BitsVec* x) {
  for (int i = 0; i < LANES; i++)
    if (!(i & D)) swap_blocks<D>(x[i], x[i + D]);
  if constexpr (D > 1) transpose<D / 2>(x);
}

// The elements of a row from p on, as many as fit and as there are; the others zero.
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

// Products run over 32-bit words, moved as floats: one fp32, or two bf16 where the processor takes
// the dot product of such pairs at once. Elsewhere bf16 is widened to fp32, which is exact.
#ifdef HAS_BF16_PRODUCT
template <class T>
constexpr int PER_WORD = 4 / sizeof(T);
#else
template <class T>
constexpr int PER_WORD = 1;
#endif
template <class T>
constexpr bool IS_WIDENED = PER_WORD<T> * sizeof(T) < 4;

// sum += a . b, word by word.
inline void multiply_add(Vec& sum, Vec a, Vec b, float) { sum = fused(a, b, sum); }
inline void multiply_add(Vec& sum, Vec a, Vec b, bf16) {
#ifdef HAS_BF16_PRODUCT
  sum = (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  sum = fused(a, b, sum);
#endif
}

// x rounded to what a product takes of it; the same as store()'s rounding but for numbers below
// fp32's normal ones, which may become zero.
inline HalfVec to_halves(Vec x) {
#ifdef HAS_BF16_PRODUCT
  return (HalfVec)_mm512_cvtneps_pbh((__m512)x);
#else
  HalfVec half;
  bf16 rounded[LANES];
  store(rounded, x);
  memcpy(&half, rounded, sizeof half);
  return half;
#endif
}

// Words of PER_WORD rows, element by element: what a product that sums over rows takes.
template <class T>
inline void interleave_rows(float* to, const T* const (&rows)[PER_WORD<T>], int64_t size) {
  for_runs(size, [&](int64_t i, int64_t n) {
    if constexpr (PER_WORD<T> == 1) {
      store_run(to + i, load_run(rows[0] + i, n), n);
    } else {  // a bf16 is the upper half of its fp32
      BitsVec low = as_bits(load_run(rows[0] + i, n)) >> 16;
      BitsVec high = rows[1] ? as_bits(load_run(rows[1] + i, n)) : BitsVec{};
      store_run(to + i, as_floats(low | high), n);
    }
  });
}

// `size` elements as a product takes them.
template <class T>
inline void copy_words(float* to, const T* from, int64_t size) {
  if constexpr (IS_WIDENED<T>)
    for_runs(size, [&](int64_t i, int64_t n) { store_run(to + i, load_run(from + i, n), n); });
  else
    memcpy(to, from, size * sizeof(T));
}

// The first LANES words of a row, or as many as its elements make; the others zero.
template <class T>
inline BitsVec load_product_words(const T* p, int64_t num_elements) {
  if constexpr (!IS_WIDENED<T>) return load_words(p, num_elements);
  if (num_elements >= LANES) return as_bits(load(p));
  return num_elements > 0 ? as_bits(load_part(p, num_elements)) : BitsVec{};
}

// Term h of each word of a weight: itself, or the bf16 of lower (0) and of higher address (1).
template <class T>
constexpr int TERMS = IS_WIDENED<T> ? 2 : 1;
template <class T>
inline Vec term(Vec word, int h) {
  if constexpr (!IS_WIDENED<T>) return word;
  return as_floats(h == 0 ? as_bits(word) << 16 : as_bits(word) & 0xffff0000u);
}

// int8 as fp32.
inline Vec load(const int8_t* p) {
#if defined(HAS_AVX512)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__) && VECTOR_LANES == 8
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  ByteVec bytes;
  memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
#endif
}
// PER_WORD int8 of each of LANES words as a product of T takes them: bf16 holds them exactly.
template <class T>
inline Vec widen_words(const int8_t* p) {
#ifdef HAS_BF16_PRODUCT
  if constexpr (PER_WORD<T> == 2)
    return (Vec)_mm512_cvtne2ps_pbh((__m512)load(p + LANES), (__m512)load(p));
#endif
  return load(p);
}

// Calls f<R>() for runs of rows, at most MOST at a time.
template <int MOST, class F>
void by_rows(int64_t num_rows, F f) {
  int64_t r = 0;
  for (; r + MOST <= num_rows; r += MOST) f(r, std::integral_constant<int, MOST>());
  if constexpr (MOST > 1)
    if (r < num_rows) by_rows<MOST - 1>(num_rows - r, [&](int64_t i, auto n) { f(r + i, n); });
}
