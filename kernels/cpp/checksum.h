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

// True if no element is NaN or infinite: those are the ones whose exponent's bits are all set. Seen
// as integers shifted left past the sign, they are all that is not below the exponent alone.
template <class Bits>
inline bool is_block_finite(const char* bytes, int64_t num_bytes, Bits infinity) {
  const Bits* x = reinterpret_cast<const Bits*>(bytes);
  Bits largest = 0;
  int64_t num = num_bytes / int64_t(sizeof(Bits));
  for (int64_t i = 0; i < num; i++) largest = std::max(largest, Bits(x[i] << 1));
  return largest < Bits(infinity << 1);
}

// Several ranges of bytes at a time: their threads meet once, not once a range, which costs more
// than the work where they share a core with others. Blocks are dealt out one by one, so that a
// thread that is interrupted holds up one of them.
// `to`, `sums` and `is_finite` may be null: then nothing is copied, summed or looked at.
// `elements` are the bytes of each range's floating-point numbers: 4, 2 (bfloat16).
inline void for_ranges(int64_t num, char* const* to, const char* const* from,
                       const int64_t* num_bytes, const int64_t* elements, int64_t* sums,
                       int64_t* is_finite, int64_t threads) {
  int64_t block_bytes = BLOCK_WORDS * 8;
  std::vector<int64_t> first(size_t(num) + 1, 0); // each range's first block
  int64_t all_bytes = 0;
  for (int64_t r = 0; r < num; r++) {
    first[size_t(r) + 1] = first[size_t(r)] + (num_bytes[r] + block_bytes - 1) / block_bytes;
    all_bytes += num_bytes[r];
  }
  int64_t num_blocks = first[size_t(num)];
  std::vector<uint64_t> totals(size_t(num_blocks), 0);
  std::vector<char> is_bad(size_t(num_blocks), 0);
  parallel_for(num_blocks, threads_for(all_bytes / 4, threads), [&](int64_t b) {
    int64_t r = std::upper_bound(first.begin(), first.end(), b) - first.begin() - 1;
    int64_t place = b - first[size_t(r)], begin = place * block_bytes;
    int64_t size = std::min(block_bytes, num_bytes[r] - begin);
    const char* x = from[r] + begin;
    if (is_finite != nullptr) {
      is_bad[size_t(b)] = elements[r] == 4 ? !is_block_finite<uint32_t>(x, size, 0x7f800000u)
                                           : !is_block_finite<uint16_t>(x, size, 0x7f80u);
    }
    if (to != nullptr || sums != nullptr) {
      char* target = to == nullptr ? nullptr : to[r] + begin;
      totals[size_t(b)] = sum_of_block(target, x, size, uint64_t(place * BLOCK_WORDS));
    }
  });
  for (int64_t r = 0; r < num; r++) {
    uint64_t total = 0;
    bool is_good = true;
    for (int64_t b = first[size_t(r)]; b < first[size_t(r) + 1]; b++) {
      total += totals[size_t(b)];
      is_good = is_good && !is_bad[size_t(b)];
    }
    if (sums != nullptr) sums[r] = int64_t(total);
    if (is_finite != nullptr) is_finite[r] = is_good;
  }
}
