// A checksum at the memory's speed: the sum of w[i] · (2 i + 1) over the 64-bit words w of a range
// of bytes, modulo 2^64; the last word is filled up with zeros. Every weight is odd, so that no change
// of a single word can hide, and every word has its own, so that words cannot change places unseen.
// It notices accidents, not forgeries. Additions modulo 2^64 commute: threads change no bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "parallel.h"

constexpr int64_t SUM_LANES = 8;             // words added side by side
constexpr int64_t BLOCK_WORDS = 1 << 12; // 32 KB, which a first-level cache holds
typedef uint64_t __attribute__((aligned(1), may_alias)) unaligned_word;

// The sum of w[i] · (2 (first + i) + 1) for `num` words, a multiple of SUM_LANES. Running sums
// take the place of products: after R rows, `runs` is the sum of (R - r) · w[r], `sums` that of w[r].
inline uint64_t total_of(const uint64_t* sums, const uint64_t* runs, int64_t rows, uint64_t first) {
  uint64_t total = 0;
  for (int64_t j = 0; j < SUM_LANES; j++) {
    uint64_t by_row = uint64_t(rows) * sums[j] - runs[j];
    total += 2 * SUM_LANES * by_row + (2 * (first + uint64_t(j)) + 1) * sums[j];
  }
  return total;
}

inline uint64_t sum_of_rows(const unaligned_word* w, int64_t num, uint64_t first) {
  uint64_t sums[SUM_LANES] = {0}, runs[SUM_LANES] = {0};
  int64_t rows = num / SUM_LANES;
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t j = 0; j < SUM_LANES; j++) {
      sums[j] += w[r * SUM_LANES + j];
      runs[j] += sums[j];
    }
  }
  return total_of(sums, runs, rows, first);
}

// The same while the rows are copied, each word loaded once. Where it can, the copy goes past the
// caches: somebody else reads it, and a line that is overwritten whole need not be fetched first.
inline uint64_t copy_rows(unaligned_word* to, const unaligned_word* w, int64_t num,
                          uint64_t first) {
#if defined(__AVX2__)
  if (reinterpret_cast<uintptr_t>(to) % 32 == 0) {
    __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    __m256i runs[2] = {sums[0], sums[1]};
    int64_t rows = num / SUM_LANES;
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t half = 0; half < 2; half++) {
        int64_t at = r * SUM_LANES + half * 4;
        __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + at));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), x);
        sums[half] = _mm256_add_epi64(sums[half], x);
        runs[half] = _mm256_add_epi64(runs[half], sums[half]);
      }
    }
    _mm_sfence();
    alignas(32) uint64_t flat_sums[SUM_LANES], flat_runs[SUM_LANES];
    for (int64_t half = 0; half < 2; half++) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(flat_sums + 4 * half), sums[half]);
      _mm256_store_si256(reinterpret_cast<__m256i*>(flat_runs + 4 * half), runs[half]);
    }
    return total_of(flat_sums, flat_runs, rows, first);
  }
#endif
  std::memcpy(to, w, size_t(num * 8));
  return sum_of_rows(w, num, first);
}

// `to` may be null: nothing is copied then.
inline uint64_t sum_of_block(char* to, const char* x, int64_t num_bytes, uint64_t first) {
  int64_t whole = num_bytes / 8 / SUM_LANES * SUM_LANES;
  const unaligned_word* words = reinterpret_cast<const unaligned_word*>(x);
  uint64_t total = to == nullptr ? sum_of_rows(words, whole, first)
                                 : copy_rows(reinterpret_cast<unaligned_word*>(to), words, whole,
                                             first);
  for (int64_t at = whole * 8; at < num_bytes; at += 8) {
    uint64_t word = 0;
    size_t size = size_t(std::min<int64_t>(8, num_bytes - at));
    std::memcpy(&word, x + at, size);
    if (to != nullptr) std::memcpy(to + at, &word, size);
    total += word * (2 * (first + uint64_t(at / 8)) + 1);
  }
  return total;
}

inline int64_t checksum_bytes(char* to, const char* from, int64_t num_bytes, int64_t threads) {
  int64_t block_bytes = BLOCK_WORDS * 8;
  int64_t num_blocks = (num_bytes + block_bytes - 1) / block_bytes;
  std::vector<uint64_t> sums(size_t(num_blocks), 0);
  parallel_for(num_blocks, threads_for(num_bytes / 4, threads), [&](int64_t b) {
    int64_t begin = b * block_bytes, size = std::min(block_bytes, num_bytes - begin);
    char* target = to == nullptr ? nullptr : to + begin;
    sums[size_t(b)] = sum_of_block(target, from + begin, size, uint64_t(b * BLOCK_WORDS));
  });
  uint64_t total = 0;
  for (uint64_t sum : sums) total += sum;
  return int64_t(total);
}

// A copy past the caches, see copy_rows, whose sums cost it nothing.
inline void copy_bytes(char* to, const char* from, int64_t num_bytes, int64_t threads) {
#if defined(__AVX2__)
  checksum_bytes(to, from, num_bytes, threads);
#else
  int64_t block_bytes = BLOCK_WORDS * 8;
  parallel_for((num_bytes + block_bytes - 1) / block_bytes, threads_for(num_bytes / 4, threads),
               [&](int64_t b) {
                 int64_t begin = b * block_bytes;
                 int64_t size = std::min(block_bytes, num_bytes - begin);
                 std::memcpy(to + begin, from + begin, size_t(size));
               });
#endif
}

// 1 if no element is NaN or infinite: those are the ones whose exponent's bits are all set. Seen as
// integers shifted left past the sign, they are all that is not below the exponent alone.
template <class Bits>
inline int64_t all_finite(const Bits* x, int64_t num, Bits infinity, int64_t threads) {
  int64_t block = BLOCK_WORDS * 8 / int64_t(sizeof(Bits)), num_blocks = (num + block - 1) / block;
  std::vector<char> is_bad(size_t(num_blocks), 0);
  parallel_for(num_blocks, threads_for(num, threads), [&](int64_t b) {
    Bits largest = 0;
    int64_t end = std::min(num, (b + 1) * block);
    for (int64_t i = b * block; i < end; i++) largest = std::max(largest, Bits(x[i] << 1));
    is_bad[size_t(b)] = largest >= Bits(infinity << 1);
  });
  return std::none_of(is_bad.begin(), is_bad.end(), [](char bad) { return bad; });
}
