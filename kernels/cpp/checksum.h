// A checksum at the memory's speed: the sum of w[i] · (2 i + 1) over the 64-bit words w of a range of
// bytes, modulo 2^64; the last word is filled up with zeros. Every weight is odd, so that no change
// of a single word can hide, and every word has its own, so that words cannot change places unseen.
// It notices accidents, not forgeries. Additions modulo 2^64 commute: threads change no bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "parallel.h"

constexpr int64_t SUM_LANES = 8;             // words added side by side
constexpr int64_t BLOCK_WORDS = 1 << 12; // 32 KB, which a first-level cache holds
typedef uint64_t __attribute__((aligned(1), may_alias)) unaligned_word;

// The sum of w[i] · (2 (first + i) + 1) for `num` words, a multiple of SUM_LANES. Running sums take the
// place of products: after R rows, `runs` is the sum of (R - r) · w[r], `sums` that of w[r].
inline uint64_t sum_of_rows(const unaligned_word* w, int64_t num, uint64_t first) {
  uint64_t sums[SUM_LANES] = {0}, runs[SUM_LANES] = {0};
  int64_t rows = num / SUM_LANES;
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t j = 0; j < SUM_LANES; j++) {
      sums[j] += w[r * SUM_LANES + j];
      runs[j] += sums[j];
    }
  }
  uint64_t total = 0;
  for (int64_t j = 0; j < SUM_LANES; j++) {
    uint64_t by_row = uint64_t(rows) * sums[j] - runs[j];
    total += 2 * SUM_LANES * by_row + (2 * (first + uint64_t(j)) + 1) * sums[j];
  }
  return total;
}

inline uint64_t sum_of_block(const char* x, int64_t num_bytes, uint64_t first) {
  int64_t whole = num_bytes / 8 / SUM_LANES * SUM_LANES;
  const unaligned_word* words = reinterpret_cast<const unaligned_word*>(x);
  uint64_t total = sum_of_rows(words, whole, first);
  for (int64_t at = whole * 8; at < num_bytes; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, x + at, size_t(std::min<int64_t>(8, num_bytes - at)));
    total += word * (2 * (first + uint64_t(at / 8)) + 1);
  }
  return total;
}

// Past the caches: what is written here is read by another process, and a line that is overwritten
// whole need not be fetched first.
inline void copy_block(char* to, const char* from, int64_t num_bytes) {
  int64_t done = 0;
#if defined(__AVX__)
  if (reinterpret_cast<uintptr_t>(to) % 32 == 0) {
    for (; done + 32 <= num_bytes; done += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + done),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + done)));
    }
    _mm_sfence();
  }
#endif
  std::memcpy(to + done, from + done, size_t(num_bytes - done));
}

// `to` may be null: nothing is copied then.
inline int64_t checksum_bytes(char* to, const char* from, int64_t num_bytes, int64_t threads) {
  int64_t block_bytes = BLOCK_WORDS * 8;
  int64_t num_blocks = (num_bytes + block_bytes - 1) / block_bytes;
  std::vector<uint64_t> sums(size_t(num_blocks), 0);
  parallel_for(num_blocks, threads_for(num_bytes / 4, threads), [&](int64_t b) {
    int64_t begin = b * block_bytes, size = std::min(block_bytes, num_bytes - begin);
    sums[size_t(b)] = sum_of_block(from + begin, size, uint64_t(b * BLOCK_WORDS));
    if (to != nullptr) copy_block(to + begin, from + begin, size);
  });
  uint64_t total = 0;
  for (uint64_t sum : sums) total += sum;
  return int64_t(total);
}
