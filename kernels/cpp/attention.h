// Attention of tiles of queries, over keys that are found through a table of rows: causal, or with
// a step of 0 such that all queries of a tile see the same keys.
//
//     o = softmax(scale * q . K^T) . V
//
// One kernel for everything: `key_rows` lists, key by key, the row of k and v where a sequence's
// keys lie, be that a packed batch, the blocks of a paged cache or a prompt that sequences share.
// A query's result is a function of its own q and of its keys in order: dot products run along
// head_dim (word by word), the sum of weights in LANES lanes by the key's index, the sum of values key
// by key. So it has the same bits in prefill, in decoding and in training, whatever else is in the
// batch.
//
// With a window of w a query sees the last w of those keys, itself included. Keys that no query of a
// tile sees are skipped: values from the first that is seen, scores from the multiple of LANES before
// it, counted from the sequence's first key, so that each key stays in its lane. To a query whose
// own window begins later the keys in between have weight 0, as those behind it have: they must be
// finite, and change no bit.
//
// A head may have a sink: a score beside those of its keys that takes its part of the softmax and has
// no value. It joins the maximum after all keys, and the sum of weights as its last term.
//
// A tile is some queries of one sequence and all heads that share a key head: rows of queries by
// keys. Scores of a tile stay in the processor's cache; weights, and their product with the values,
// are fp32. With a step of 0, where nothing is decoded, the product takes the keys two by two, as the
// gradient does: in bf16, where the processor multiplies pairs, weights are rounded to it first.
//
// Tiles whose sequences begin with the same keys (completions of one prompt) form a team:
// those keys and their values are read once for all of its rows. Each row still meets its keys in
// its own order, so a team changes no bit.
//
// Products take keys in runs: word by word, LANES keys side by side. Keys that lie in rows are laid
// out so, tile by tile; a cache may hold them so (store_key in rows.h).
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "vector.h"

constexpr int KEY_TILE = 64;  // keys multiplied at a time: 8 KB of bf16 pairs at head_dim 64
constexpr int AHEAD = 32;  // keys between the one laid out and the one asked of memory
constexpr int VALUES_AHEAD = KEY_TILE;  // behind the keys of a cache come as many values
// Rows and runs of keys, rows and vectors of values, whose sums stay in registers.
constexpr int SCORE_ROWS = REGISTERS == 32 ? 8 : 6, FEW_ROWS = REGISTERS == 32 ? 3 : 2;
constexpr int VALUE_ROWS = 6, VALUE_VECS = REGISTERS == 32 ? 4 : 2;

struct Tile {
  int32_t query, num_queries;
  int32_t num_keys;  // that the last query sees; the one before it sees `step` less
  int32_t first_key;  // in key_rows
  int32_t team;    // tiles of the team that it leads, itself and those behind it; 0: it follows
  int32_t shared;  // the first keys of a leader that its team has in common: whole LANES
};

template <class T>
struct Problem {
  T* o;
  const T *q, *k, *v;
  const int32_t* key_rows;
  int64_t num_kv, group, head_dim;
  int64_t q_stride;                       // elements from token to token; o is contiguous
  int64_t k_row, v_row, k_head, v_head;  // elements from row to row, and from head to head
  float scale;
  int64_t window;  // keys that a query sees, itself included; 0: all
  int64_t has_key_runs;  // k is a cache that `store_key` filled; rows begin at whole runs in it
  const float* sinks = nullptr;  // [query heads]; nullptr: none
  int64_t step = 1;  // keys that a query sees more than the one before it; 0: all see the same
};

// How the keys of such a cache lie in memory; laid out here they are words.
template <class T>
using CachedKey = std::conditional_t<IS_WIDENED<T>, T, float>;

// Rows lie where the table says, so the processor cannot guess the next one.
template <class T>
inline void ask_for(const T* row, int64_t size) {
  for (int64_t i = 0; i < size; i += LINE_BYTES / sizeof(T)) __builtin_prefetch(row + i);
}

// out[w * STEP + j] = word w of the row of key j; zeros behind the last of num_keys.
template <int STEP = LANES, class T>
void transpose_keys(float* out, const T* k, const int32_t* rows, int64_t num_keys,
                    int64_t num_ahead, int64_t row_stride, int64_t head_dim) {
  for (int64_t j = AHEAD; j < AHEAD + num_ahead; j++) ask_for(k + rows[j] * row_stride, head_dim);
  for (int64_t d = 0; d < head_dim; d += LANES * PER_WORD<T>) {
    BitsVec x[LANES] = {};
    if (num_keys == LANES)  // of known length, so that they stay in registers
      for (int j = 0; j < LANES; j++)
        x[j] = load_product_words(k + rows[j] * row_stride + d, head_dim - d);
    else
      for (int64_t j = 0; j < num_keys; j++)
        x[j] = load_product_words(k + rows[j] * row_stride + d, head_dim - d);
    transpose(x);
    for (int64_t i = 0; i < LANES; i++)
      store(out + (d / PER_WORD<T> + i) * STEP, as_floats(x[i]));
  }
}

// Scores of R rows and B runs of LANES keys. From a cache it asks memory for the `next` runs.
template <int R, int B, bool IS_CACHED, class Key, class T>
void multiply_keys(float* s, int64_t s_stride, const float* q, int64_t q_stride,
                   int64_t num_words, const Key* const* runs, const Key* const* next, float scale,
                   T) {
  Vec sum[R][B] = {};
  for (int64_t w = 0; w < num_words; w++) {
    Vec k[B];
    for (int b = 0; b < B; b++) {
      k[b] = load(runs[b] + w * LANES);
      if constexpr (IS_CACHED) __builtin_prefetch(next[b] + w * LANES);
    }
    for (int r = 0; r < R; r++) {
      Vec query = splat_word(q + r * q_stride + w);
      for (int b = 0; b < B; b++) multiply_add(sum[r][b], k[b], query, T());
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) store(s + r * s_stride + b * LANES, sum[r][b] * scale);
}

// out[r] += over the keys in order, p[r][j] * v[j], for R rows and W vectors of head_dim.
template <int R, int W, class T>
void multiply_values(float* out, int64_t out_stride, const float* p, int64_t p_stride, const T* v,
                     const int32_t* rows, int64_t num_keys, int64_t row_stride) {
  Vec sum[R][W];
  for (int r = 0; r < R; r++)
    for (int w = 0; w < W; w++) sum[r][w] = load(out + r * out_stride + w * LANES);
  for (int64_t j = 0; j < num_keys; j++) {
    const T* row = v + rows[j] * row_stride;
    if (j + VALUES_AHEAD < num_keys) ask_for(v + rows[j + VALUES_AHEAD] * row_stride, W * LANES);
    Vec x[W];
    for (int w = 0; w < W; w++) x[w] = load(row + w * LANES);
    for (int r = 0; r < R; r++)
      for (int w = 0; w < W; w++) sum[r][w] = fused(x[w], splat(p[r * p_stride + j]), sum[r][w]);
  }
  for (int r = 0; r < R; r++)
    for (int w = 0; w < W; w++) store(out + r * out_stride + w * LANES, sum[r][w]);
}

// The same for the last n < LANES elements of head_dim.
template <class T>
void multiply_values_part(float* out, const float* p, const T* v, const int32_t* rows,
                          int64_t num_keys, int64_t row_stride, int64_t n) {
  Vec sum = load(out);
  for (int64_t j = 0; j < num_keys; j++)
    sum = fused(load_part(v + rows[j] * row_stride, n), splat(p[j]), sum);
  store(out, sum);
}

// out[r] += over words of neighbouring keys, p[r][w] * v[w], for R rows and W vectors of head_dim. The
// sums go on from `out`, as in multiply_values, so that fp32 has the bits of a sum key by key.
template <int R, int W, class T>
void multiply_value_words(float* out, int64_t out_stride, const float* p, int64_t p_stride,
                          const float* v, int64_t v_stride, int64_t num_words, T) {
  Vec sum[R][W];
#pragma GCC unroll 8  // else gcc 12 moves the sums through the stack
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) sum[r][w] = load(out + r * out_stride + w * LANES);
  for (int64_t k = 0; k < num_words; k++) {
    Vec x[W];
    for (int w = 0; w < W; w++) x[w] = load(v + k * v_stride + w * LANES);
    for (int r = 0; r < R; r++) {
      Vec weight = splat_word(p + r * p_stride + k);
      for (int w = 0; w < W; w++) multiply_add(sum[r][w], x[w], weight, T());
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) store(out + r * out_stride + w * LANES, sum[r][w]);
}

// In place: zeros, e^(s - max s) of scores first..n of a row, zeros. Returns 1 / their sum. With a
// `sink` the maximum and the sum are also over that score, and its own weight goes to `sink_weight`.
inline float softmax_row(float* s, int64_t first, int64_t n, int64_t padded,
                         const float* sink = nullptr, float* sink_weight = nullptr) {
  const int64_t begin = first / LANES * LANES, end = (n + LANES - 1) / LANES * LANES;
  for (int64_t j = 0; j < begin; j++) s[j] = 0.0f;
  // whole vectors, since a load of what was stored in parts has to wait for it
  const Vec nothing = splat(-INFINITY);
  if (begin < first) store(s + begin, choose(first_lanes(first - begin), nothing, load(s + begin)));
  if (n < end) {
    float* last = s + end - LANES;
    store(last, choose(first_lanes(n - end + LANES), load(last), nothing));
  }
  Vec best = splat(-INFINITY);
  for (int64_t j = begin; j < end; j += LANES) best = larger(best, load(s + j));
  const float of_keys = max_lanes(best), top = sink ? std::max(of_keys, *sink) : of_keys;
  Vec highest = splat(top), sum = {};
  for (int64_t j = begin; j < end; j += LANES) {
    Vec p = exp_below(load(s + j) - highest);
    sum += p;
    store(s + j, p);
  }
  for (int64_t j = end; j < padded; j++) s[j] = 0.0f;
  if (!sink) return 1.0f / sum_lanes(sum);
  float of_sink[LANES];
  store(of_sink, exp(splat(*sink - top)));
  const float inverse = 1.0f / (sum_lanes(sum) + of_sink[0]);
  if (sink_weight) *sink_weight = of_sink[0] * inverse;
  return inverse;
}

// In place: numbers as words of two bf16, half as many.
inline void pair_row(float* s, int64_t n) {
  for (int64_t j = 0; j < n; j += 2 * LANES) {
    HalfVec halves[2] = {to_halves(load(s + j)), to_halves(load(s + j + LANES))};
    memcpy(s + j / 2, halves, sizeof halves);
  }
}

struct Scratch {
  std::vector<float> q, keys, scores, out, inverse;
};

// Sizes of a row in a Scratch, in floats.
struct Widths {
  int64_t words, out, scores;
};

// Scores of some rows and a tile of runs.
template <bool IS_CACHED, class Key, class T>
void score_runs(float* s, const float* q, int64_t num_rows, const Key* const* runs,
                const Key* const* next, int64_t num_runs, const Problem<T>& x, Widths width) {
  const int64_t num_words = (x.head_dim + PER_WORD<T> - 1) / PER_WORD<T>;
  by_rows<SCORE_ROWS>(num_rows, [&](int64_t r, auto R) {
    constexpr int B = R <= FEW_ROWS ? 4 : 2;
    const float* row = q + r * width.words;
    float* to = s + r * width.scores;
    int64_t b = 0;
    for (; b + B <= num_runs; b += B)
      multiply_keys<R, B, IS_CACHED>(to + b * LANES, width.scores, row, width.words, num_words,
                                     runs + b, next + b, x.scale, T());
    for (; b < num_runs; b++)
      multiply_keys<R, 1, IS_CACHED>(to + b * LANES, width.scores, row, width.words, num_words,
                                     runs + b, next + b, x.scale, T());
  });
}

// Scores of some rows and keys begin..end; begin is a multiple of LANES. `v` is for what comes next.
template <class T>
void score_keys(float* s, const float* q, int64_t num_rows, const T* k, const T* v,
                const int32_t* rows, int64_t begin, int64_t end, const Problem<T>& x, Widths width,
                float* keys) {
  constexpr int64_t MOST = KEY_TILE / LANES;
  for (int64_t lo = begin; lo < end; lo += KEY_TILE) {
    const int64_t num_runs = std::min((end - lo + LANES - 1) / LANES, MOST);
    if (x.has_key_runs) {
      const CachedKey<T>*runs[MOST], *next[MOST];
      const int64_t last = (end - 1) / LANES * LANES;
      for (int64_t b = 0; b < num_runs; b++) {
        const int64_t first = lo + b * LANES, ahead = first + KEY_TILE;
        const int64_t value = std::min(begin + ahead - LANES - last, last);
        runs[b] = (const CachedKey<T>*)(k + rows[first] * x.k_row);
        next[b] = (const CachedKey<T>*)(ahead < end ? k + rows[ahead] * x.k_row
                                                    : v + rows[value] * x.v_row);
      }
      score_runs<true>(s + lo, q, num_rows, runs, next, num_runs, x, width);
      continue;
    }
    const float* runs[MOST];
    for (int64_t b = 0; b < num_runs; b++) {
      const int64_t first = lo + b * LANES, left = end - first;
      const int64_t n = std::min<int64_t>(left, LANES);
      const int64_t ahead = std::clamp<int64_t>(left - AHEAD, 0, LANES);
      float* to = keys + b * LANES * width.words;
      transpose_keys(to, k, rows + first, n, ahead, x.k_row, x.head_dim);
      runs[b] = to;
    }
    score_runs<false>(s + lo, q, num_rows, runs, runs, num_runs, x, width);
  }
}

// The weighted values of keys begin..end, added to some rows of `out`.
template <class T>
void add_values(float* out, const float* p, int64_t num_rows, const T* v, const int32_t* rows,
                int64_t begin, int64_t end, const Problem<T>& x, Widths width) {
  const int64_t D = x.head_dim, stride = width.scores, num_keys = end - begin;
  rows += begin, p += begin;
  by_rows<VALUE_ROWS>(num_rows, [&](int64_t r, auto R) {
    const float* weights = p + r * stride;
    float* to = out + r * width.out;
    int64_t d = 0;
    for (; d + VALUE_VECS * LANES <= D; d += VALUE_VECS * LANES)
      multiply_values<R, VALUE_VECS>(to + d, width.out, weights, stride, v + d, rows, num_keys,
                                     x.v_row);
    for (; d + LANES <= D; d += LANES)
      multiply_values<R, 1>(to + d, width.out, weights, stride, v + d, rows, num_keys, x.v_row);
    for (int64_t i = 0; d < D && i < R; i++)
      multiply_values_part(to + i * width.out + d, weights + i * stride, v + d, rows, num_keys,
                           x.v_row, D - d);
  });
}

// The same for all keys, in words of PER_WORD neighbours: of the weights, which are rounded in place,
// and of the values, which are laid out so tile by tile in `words`.
template <class T>
void add_value_words(float* out, float* p, int64_t num_rows, const T* v, const int32_t* rows,
                     int64_t num_keys, const Problem<T>& x, Widths width, float* words) {
  constexpr int64_t per_word = PER_WORD<T>;
  if constexpr (per_word > 1)
    for (int64_t r = 0; r < num_rows; r++) pair_row(p + r * width.scores, width.scores);
  for (int64_t lo = 0; lo < num_keys; lo += KEY_TILE) {
    const int64_t n = std::min<int64_t>(KEY_TILE, num_keys - lo);
    const int64_t num_words = (n + per_word - 1) / per_word;
    for (int64_t k = 0; k < num_words; k++) {
      const T* pair[per_word];
      for (int64_t i = 0; i < per_word; i++) {
        const int64_t j = k * per_word + i;
        pair[i] = j < n ? v + rows[lo + j] * x.v_row : nullptr;
      }
      interleave_rows<T>(words + k * width.out, pair, x.head_dim);
    }
    by_rows<VALUE_ROWS>(num_rows, [&](int64_t r, auto R) {
      const float* weights = p + r * width.scores + lo / per_word;
      float* to = out + r * width.out;
      int64_t d = 0;
      for (; d + VALUE_VECS * LANES <= width.out; d += VALUE_VECS * LANES)
        multiply_value_words<R, VALUE_VECS>(to + d, width.out, weights, width.scores, words + d,
                                            width.out, num_words, T());
      for (; d < width.out; d += LANES)
        multiply_value_words<R, 1>(to + d, width.out, weights, width.scores, words + d, width.out,
                                   num_words, T());
    });
  }
}

// The keys of a tile that any of its queries sees, counted from `skipped`, whole LANES before.
struct Seen {
  int64_t skipped, first, num_keys, window;
  const int32_t* rows;
  Seen(const Tile& tile, const int32_t* key_rows, int64_t w) : window(w ? w : tile.num_keys) {
    first = std::max<int64_t>(0, tile.num_keys - tile.num_queries + 1 - window);
    skipped = first / LANES * LANES;
    first -= skipped, num_keys = tile.num_keys - skipped;
    rows = key_rows + tile.first_key + skipped;
  }
};

// Calls f(query, head, row) for the rows of a tile: what they are of, and where in a Scratch.
template <class F>
void for_rows(const Tile& tile, int64_t group, int64_t first_row, F f) {
  for (int64_t i = 0; i < tile.num_queries; i++)
    for (int64_t g = 0; g < group; g++) f(tile.query + i, g, first_row + i * group + g);
}

// `num_tiles` tiles that have their first `shared` keys in common, for one key head.
template <class T>
void attend_team(const Problem<T>& x, const Tile* tiles, int64_t num_tiles, int64_t shared,
                 int64_t kv, Scratch& scratch) {
  const int64_t D = x.head_dim;
  int64_t num_rows = 0, most_keys = 0;
  for (int64_t t = 0; t < num_tiles; t++) {
    num_rows += tiles[t].num_queries * x.group;
    most_keys = std::max(most_keys, Seen(tiles[t], x.key_rows, x.window).num_keys);
  }
  // whole vectors of words; what is behind head_dim is zero
  const Widths width{(D + LANES * PER_WORD<T> - 1) / (LANES * PER_WORD<T>) * LANES,
                     (D + LANES - 1) / LANES * LANES,
                     (most_keys + KEY_TILE - 1) / KEY_TILE * KEY_TILE};
  scratch.q.assign(num_rows * width.words, 0.0f);
  scratch.out.assign(num_rows * width.out, 0.0f);
  scratch.keys.resize(KEY_TILE * width.words);
  scratch.scores.resize(num_rows * width.scores);
  scratch.inverse.resize(num_rows);
  float *q = scratch.q.data(), *s = scratch.scores.data(), *out = scratch.out.data();
  const T *k = x.k + kv * x.k_head, *v = x.v + kv * x.v_head;
  float* keys = scratch.keys.data();

  auto for_tiles = [&](auto f) {  // f(tile, its keys, its first row, its rows)
    int64_t row = 0;
    for (int64_t t = 0; t < num_tiles; t++) {
      const int64_t rows = tiles[t].num_queries * x.group;
      f(tiles[t], Seen(tiles[t], x.key_rows, x.window), row, rows);
      row += rows;
    }
  };
  for_tiles([&](const Tile& tile, const Seen&, int64_t first_row, int64_t) {
    for_rows(tile, x.group, first_row, [&](int64_t query, int64_t g, int64_t r) {
      copy_words(q + r * width.words, x.q + query * x.q_stride + (kv * x.group + g) * D, D);
    });
  });
  const int32_t* common = x.key_rows + tiles[0].first_key;
  score_keys(s, q, num_rows, k, v, common, 0, shared, x, width, keys);
  for_tiles([&](const Tile& tile, const Seen& seen, int64_t first_row, int64_t rows) {
    float* scores = s + first_row * width.scores;
    score_keys(scores, q + first_row * width.words, rows, k, v, seen.rows, shared,
               seen.num_keys, x, width, keys);
    for (int64_t r = 0; r < rows; r++) {
      int64_t visible = seen.num_keys - (tile.num_queries - 1 - r / x.group) * x.step;
      int64_t first = std::max<int64_t>(0, visible - seen.window);
      const float* sink = x.sinks ? x.sinks + kv * x.group + r % x.group : nullptr;
      scratch.inverse[first_row + r] =
          softmax_row(scores + r * width.scores, first, visible, width.scores, sink);
    }
  });
  add_values(out, s, num_rows, v, common, 0, shared, x, width);
  for_tiles([&](const Tile& tile, const Seen& seen, int64_t first_row, int64_t rows) {
    const int64_t first = std::max(shared, seen.first);
    float *to = out + first_row * width.out, *weights = s + first_row * width.scores;
    if (x.step == 0)
      add_value_words(to, weights, rows, v, seen.rows, seen.num_keys, x, width, keys);
    else
      add_values(to, weights, rows, v, seen.rows, first, seen.num_keys, x, width);
    for_rows(tile, x.group, first_row, [&](int64_t query, int64_t g, int64_t r) {
      T* to = x.o + (query * x.num_kv * x.group + kv * x.group + g) * D;
      for_runs(D, [&](int64_t d, int64_t n) {
        store_run(to + d, load(out + r * width.out + d) * scratch.inverse[r], n);
      });
    });
  });
}

template <class T>
void attend(const Problem<T>& x, const Tile* tiles, int64_t num_tiles, int64_t threads) {
  parallel_for(num_tiles * x.num_kv, threads, [&](int64_t i) {
    thread_local Scratch scratch;
    const Tile* tile = tiles + i / x.num_kv;
    const int64_t kv = i % x.num_kv;
    if (x.window)  // the first keys are those that are not seen
      for (int64_t t = 0; t < tile->team; t++) attend_team(x, tile + t, 1, 0, kv, scratch);
    else if (tile->team)
      attend_team(x, tile, tile->team, tile->shared, kv, scratch);
  });
}
