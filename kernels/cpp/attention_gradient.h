// The gradient of attention (attention.h) by its queries, keys and values.
//
//     P = softmax(scale * q . K^T)     dS = P * (dO . V^T - delta),  delta = sum over head_dim of dO * o
//     dV = P^T . dO     dK = scale * dS^T . q     dQ = scale * dS . K
//     of a head's sink, whose weight is p: - sum over queries of p * delta, as it has no value
//
// P is computed again, so that the forward pass keeps nothing but q, k, v and o. All five are products
// of words (vector.h): in bf16, where the processor multiplies pairs, P and dS are rounded to it
// before their second products; every sum is fp32.
//
// One task is one query head of one tree: the segments that share keys, of which a packed sequence is
// one alone. Segment by segment it takes BLOCK queries, with the scores of all keys that they see,
// and goes through these keys in blocks. What a key gets from several branches is therefore added in
// the order of the segments, by one thread, and then over the heads that share it, in order: a
// tree's bits do not depend on its neighbours nor on the number of threads.
//
// Left out: to share the work of one head of one tree among threads.
#pragma once

#include "attention.h"

constexpr int BLOCK = 64;  // queries, or keys, that meet at a time
constexpr int MOST_ROWS = VALUE_ROWS, MOST_VECS = VALUE_VECS;  // of a product, in registers

template <class T>
struct GradientProblem {
  T *dq, *dk, *dv;                // contiguous, as is o
  const T *q, *k, *v, *o, *grad;  // `grad`: of o
  const int32_t* key_rows;
  const Tile* spans;              // whole segments, tree by tree
  const int32_t* trees;           // tree i's are spans trees[i] to trees[i + 1]
  int64_t num_trees, num_tokens, num_kv, group, head_dim;
  int64_t q_stride, k_stride, v_stride, grad_stride;  // elements from token to token
  float scale;
  int64_t window;               // as in Problem
  float *dk_parts, *dv_parts;  // [heads, tokens, wide_head_dim]: what each query head gives to a key
  const float* sinks = nullptr;   // as in Problem
  float* dsinks = nullptr;        // [heads]
  double* dsink_parts = nullptr;  // [trees, heads]
  int64_t step = 1;               // as in Problem

  int64_t num_heads() const { return num_kv * group; }
  int64_t wide_head_dim() const { return (head_dim + LANES - 1) / LANES * LANES; }
  int64_t words() const { return (head_dim + PER_WORD<T> - 1) / PER_WORD<T>; }  // of a row
  int64_t wide_words() const { return (words() + LANES - 1) / LANES * LANES; }
};

// to[r] (+)= factor * sum over words k of a[r][k] * b[k], for R rows and W vectors. Word k of row r
// lies at a + r * a_row + k * a_step.
template <int R, int W, class T>
void multiply_words(float* const* to, bool is_added, float factor, const float* a, int64_t a_row,
                    int64_t a_step, const float* b, int64_t b_step, int64_t num_words, T) {
  Vec sum[R][W] = {};
  for (int64_t k = 0; k < num_words; k++) {
    Vec x[W];
    for (int w = 0; w < W; w++) x[w] = load(b + k * b_step + w * LANES);
    for (int r = 0; r < R; r++) {
      Vec word = splat_word(a + r * a_row + k * a_step);
      for (int w = 0; w < W; w++) multiply_add(sum[r][w], x[w], word, T());
    }
  }
#pragma GCC unroll 8  // else gcc 12 moves the sums through the stack, a quarter of the time
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) {
      float* out = to[r] + w * LANES;
      Vec product = sum[r][w] * factor;
      store(out, is_added ? load(out) + product : product);
    }
}

struct Run {
  int64_t begin, end;
  bool is_empty() const { return begin >= end; }
};

// Some queries of a segment, and the keys that they see.
struct QueryBlock {
  int64_t query;  // the token of the first
  int64_t num_queries;
  int64_t position;  // of the first among the segment's keys: the last key that it sees
  int64_t window;
  int64_t first_key;  // that any of them sees
  int64_t step;       // keys that a query sees more than the one before it: 1, or 0

  int64_t num_keys() const { return position + 1 + (num_queries - 1) * step; }
  int64_t first_block() const { return first_key / BLOCK; }
  int64_t num_blocks() const { return (num_keys() + BLOCK - 1) / BLOCK - first_block(); }
  static int64_t clamp(int64_t x, int64_t most) { return x < 0 ? 0 : x > most ? most : x; }

  // The vectors of block `key`.. of keys that any of `rows` queries from r on sees.
  Run seen_vectors(int64_t r, int64_t rows, int64_t key) const {
    const int64_t lo = clamp(position + r * step + 1 - window - key, BLOCK);
    const int64_t hi = clamp(position + (r + rows - 1) * step + 1 - key, BLOCK);
    return {lo / LANES, (hi + LANES - 1) / LANES};
  }
  // The words of queries that see any of `rows` keys from `key` on.
  Run seeing_words(int64_t key, int64_t rows, int64_t per_word) const {
    const int64_t lo = clamp(key - position, num_queries);
    const int64_t hi = clamp(key + rows - 1 + window - position, num_queries);
    return {lo / per_word, (hi + per_word - 1) / per_word};
  }
};

struct GradientScratch {
  // of a segment's keys, in blocks: words of k and v across keys, words of neighbouring keys
  std::vector<float> k_across, v_across, k_pairs;
  // of a block of queries
  std::vector<float> q, grad, q_pairs, grad_pairs, scores, dq, delta, inverse;
  double dsink;  // of the head, over the queries so far
  // of a block of queries and one of keys
  std::vector<float> dp, p_pairs, ds_pairs, ds;
};

template <class T>
void pack_segment(const GradientProblem<T>& x, const Tile& span, int64_t kv,
                  GradientScratch& scratch) {
  const int64_t D = x.head_dim, wide_D = x.wide_head_dim(), block_words = x.wide_words() * BLOCK;
  const int64_t num_keys = span.num_keys, num_blocks = (num_keys + BLOCK - 1) / BLOCK;
  const int32_t* rows = x.key_rows + span.first_key;
  const T *k = x.k + kv * D, *v = x.v + kv * D;
  scratch.k_across.resize(num_blocks * block_words);
  scratch.v_across.resize(num_blocks * block_words);
  for (int64_t j = 0; j < num_keys; j += LANES) {
    const int64_t to = j / BLOCK * block_words + j % BLOCK;
    const int64_t n = std::min<int64_t>(LANES, num_keys - j);
    transpose_keys<BLOCK>(&scratch.k_across[to], k, rows + j, n, 0, x.k_stride, D);
    transpose_keys<BLOCK>(&scratch.v_across[to], v, rows + j, n, 0, x.v_stride, D);
  }
  constexpr int64_t per_word = PER_WORD<T>;
  scratch.k_pairs.assign(num_blocks * BLOCK / per_word * wide_D, 0.0f);
  for (int64_t j = 0; j < num_keys; j += per_word) {
    const T* pair[per_word];
    for (int64_t i = 0; i < per_word; i++)
      pair[i] = j + i < num_keys ? k + rows[j + i] * x.k_stride : nullptr;
    interleave_rows<T>(&scratch.k_pairs[j / per_word * wide_D], pair, D);
  }
}

// Queries and gradients of one head, as rows of words and as words of neighbouring rows; delta.
template <class T>
void pack_queries(const GradientProblem<T>& x, const QueryBlock& block, int64_t head,
                  GradientScratch& scratch) {
  constexpr int64_t per_word = PER_WORD<T>;
  const int64_t D = x.head_dim, wide_D = x.wide_head_dim(), words = x.words();
  const int64_t n = block.num_queries, num_pairs = (n + per_word - 1) / per_word;
  const T *q = x.q + block.query * x.q_stride + head * D;
  const T *grad = x.grad + block.query * x.grad_stride + head * D;
  const T* o = x.o + (block.query * x.num_heads() + head) * D;
  for (auto* rows : {&scratch.q, &scratch.grad}) rows->assign(n * words, 0.0f);
  for (auto* rows : {&scratch.q_pairs, &scratch.grad_pairs}) rows->assign(num_pairs * wide_D, 0.0f);
  scratch.delta.resize(n);
  for (int64_t i = 0; i < n; i++) {
    copy_words(&scratch.q[i * words], q + i * x.q_stride, D);
    copy_words(&scratch.grad[i * words], grad + i * x.grad_stride, D);
    Vec sum = {};
    for_runs(D, [&](int64_t d, int64_t m) {
      sum = fused(load_run(grad + i * x.grad_stride + d, m),
                  load_run(o + i * x.num_heads() * D + d, m), sum);
    });
    scratch.delta[i] = sum_lanes(sum);
  }
  for (int64_t i = 0; i < n; i += per_word) {
    const T *q_rows[per_word], *grad_rows[per_word];
    for (int64_t h = 0; h < per_word; h++) {
      q_rows[h] = i + h < n ? q + (i + h) * x.q_stride : nullptr;
      grad_rows[h] = i + h < n ? grad + (i + h) * x.grad_stride : nullptr;
    }
    interleave_rows<T>(&scratch.q_pairs[i / per_word * wide_D], q_rows, D);
    interleave_rows<T>(&scratch.grad_pairs[i / per_word * wide_D], grad_rows, D);
  }
}

// to [num_queries, ...] = factor * rows . across, for the keys of the block from `key` on that are seen.
template <class T>
void multiply_across(float* to, int64_t to_row, float factor, const float* rows,
                     const float* across, int64_t words, const QueryBlock& block, int64_t key) {
  by_rows<MOST_ROWS>(block.num_queries, [&](int64_t r, auto R) {
    const Run seen = block.seen_vectors(r, R, key);
    if (seen.is_empty()) return;
    by_rows<MOST_VECS>(seen.end - seen.begin, [&](int64_t v, auto W) {
      const int64_t column = (seen.begin + v) * LANES;
      float* out[MOST_ROWS];
      for (int i = 0; i < R; i++) out[i] = to + (r + i) * to_row + column;
      multiply_words<R, W>(out, false, factor, rows + r * words, words, 1, across + column, BLOCK,
                           words, T());
    });
  });
}

// From e^score and dP: P and dS in words of neighbouring queries, and dS in rows. Zero where a query
// does not see a key.
template <class T>
void differentiate_softmax(const float* scores, int64_t stride, const QueryBlock& block,
                           int64_t key, GradientScratch& scratch) {
  constexpr int64_t per_word = PER_WORD<T>;
  const int64_t n = block.num_queries;
  float *p_to = scratch.p_pairs.data(), *ds_to = scratch.ds_pairs.data(), *rows = scratch.ds.data();
  for (int64_t r = 0; r < n; r += per_word) {
    // what multiply_across has computed for these rows
    const int64_t tile = r / MOST_ROWS * MOST_ROWS, last = std::min<int64_t>(tile + MOST_ROWS, n);
    const Run seen = block.seen_vectors(tile, last - tile, key);
    for (int64_t c = 0; c < BLOCK; c += LANES) {
      Vec p[per_word] = {}, ds[per_word] = {};
      if (c >= seen.begin * LANES && c < seen.end * LANES)
        for (int64_t h = 0; h < per_word && r + h < n; h++) {
          const int64_t i = r + h;
          p[h] = load(scores + i * stride + c) * scratch.inverse[i];
          ds[h] = p[h] * (load(&scratch.dp[i * BLOCK + c]) - scratch.delta[i]);
        }
      const int64_t at = r / per_word * BLOCK + c;
      if constexpr (per_word == 1) {
        store(p_to + at, p[0]);
        store(ds_to + at, ds[0]);
      } else {
        const HalfVec low = to_halves(ds[0]), high = to_halves(ds[1]);
        store(p_to + at, pair_halves(to_halves(p[0]), to_halves(p[1])));
        store(ds_to + at, pair_halves(low, high));
        memcpy((bf16*)rows + r * BLOCK + c, &low, sizeof low);
        memcpy((bf16*)rows + (r + 1) * BLOCK + c, &high, sizeof high);
      }
    }
  }
}

// Adds what the block's queries give to the keys of one block, from `key` on, and these to dq.
template <class T>
void add_products(const GradientProblem<T>& x, const QueryBlock& block, const int32_t* key_rows,
                  int64_t key, int64_t head, GradientScratch& scratch) {
  constexpr int64_t per_word = PER_WORD<T>, row_words = BLOCK / per_word;
  const int64_t wide_D = x.wide_head_dim(), num_vecs = wide_D / LANES;
  const int64_t num_keys = std::min<int64_t>(BLOCK, block.num_keys() - key);
  float* dk = x.dk_parts + head * x.num_tokens * wide_D;
  float* dv = x.dv_parts + head * x.num_tokens * wide_D;
  by_rows<MOST_ROWS>(num_keys, [&](int64_t j, auto R) {
    const Run words = block.seeing_words(key + j, R, per_word);
    if (words.is_empty()) return;
    const int64_t num_words = words.end - words.begin, from = words.begin * BLOCK + j;
    by_rows<MOST_VECS>(num_vecs, [&](int64_t v, auto W) {
      float *dk_to[MOST_ROWS], *dv_to[MOST_ROWS];
      for (int i = 0; i < R; i++) {
        const int64_t at = key_rows[key + j + i] * wide_D + v * LANES;
        dk_to[i] = dk + at, dv_to[i] = dv + at;
      }
      const int64_t at = words.begin * wide_D + v * LANES;
      multiply_words<R, W>(dv_to, true, 1.0f, &scratch.p_pairs[from], 1, BLOCK,
                           &scratch.grad_pairs[at], wide_D, num_words, T());
      multiply_words<R, W>(dk_to, true, x.scale, &scratch.ds_pairs[from], 1, BLOCK,
                           &scratch.q_pairs[at], wide_D, num_words, T());
    });
  });
  const float* ds = per_word == 1 ? scratch.ds_pairs.data() : scratch.ds.data();
  by_rows<MOST_ROWS>(block.num_queries, [&](int64_t r, auto R) {
    const Run seen = block.seen_vectors(r, R, key);
    if (seen.is_empty()) return;
    const int64_t first = seen.begin * LANES / per_word, end = seen.end * LANES / per_word;
    by_rows<MOST_VECS>(num_vecs, [&](int64_t v, auto W) {
      float* to[MOST_ROWS];
      for (int i = 0; i < R; i++) to[i] = &scratch.dq[(r + i) * wide_D + v * LANES];
      multiply_words<R, W>(to, true, x.scale, ds + r * row_words + first, row_words, 1,
                           &scratch.k_pairs[(key / per_word + first) * wide_D + v * LANES], wide_D,
                           end - first, T());
    });
  });
}

template <class T>
void differentiate_block(const GradientProblem<T>& x, const QueryBlock& block,
                         const int32_t* key_rows, int64_t head, GradientScratch& scratch) {
  const int64_t D = x.head_dim, wide_D = x.wide_head_dim(), words = x.words();
  const int64_t block_words = x.wide_words() * BLOCK, n = block.num_queries;
  const int64_t first = block.first_block(), num_blocks = block.num_blocks();
  const int64_t stride = num_blocks * BLOCK, skipped = first * BLOCK;
  pack_queries(x, block, head, scratch);
  scratch.scores.resize(n * stride);
  scratch.inverse.resize(n);
  scratch.dq.assign(n * wide_D, 0.0f);
  for (auto* one : {&scratch.dp, &scratch.p_pairs, &scratch.ds_pairs, &scratch.ds})
    one->resize(BLOCK * BLOCK);
  float* scores = scratch.scores.data();
  for (int64_t b = 0; b < num_blocks; b++)
    multiply_across<T>(scores + b * BLOCK, stride, x.scale, scratch.q.data(),
                       &scratch.k_across[(first + b) * block_words], words, block,
                       skipped + b * BLOCK);
  for (int64_t r = 0; r < n; r++) {
    const int64_t seen = block.position + r * block.step + 1;
    const int64_t unseen = std::max<int64_t>(0, seen - block.window);
    float sink_weight = 0.0f;
    scratch.inverse[r] = softmax_row(scores + r * stride, unseen - skipped, seen - skipped, stride,
                                     x.sinks ? x.sinks + head : nullptr, &sink_weight);
    if (x.sinks) scratch.dsink -= (double)sink_weight * scratch.delta[r];
  }
  for (int64_t b = 0; b < num_blocks; b++) {
    const int64_t key = skipped + b * BLOCK;
    multiply_across<T>(scratch.dp.data(), BLOCK, 1.0f, scratch.grad.data(),
                       &scratch.v_across[(first + b) * block_words], words, block, key);
    differentiate_softmax<T>(scores + b * BLOCK, stride, block, key, scratch);
    add_products(x, block, key_rows, key, head, scratch);
  }
  for (int64_t i = 0; i < n; i++) {
    T* to = x.dq + ((block.query + i) * x.num_heads() + head) * D;
    for_runs(D, [&](int64_t d, int64_t m) {
      store_run(to + d, load(&scratch.dq[i * wide_D + d]), m);
    });
  }
}

template <class T>
void differentiate_tree(const GradientProblem<T>& x, int64_t tree, int64_t head,
                        GradientScratch& scratch) {
  const int64_t wide_D = x.wide_head_dim(), tokens = head * x.num_tokens;
  const Tile *begin = x.spans + x.trees[tree], *end = x.spans + x.trees[tree + 1];
  scratch.dsink = 0.0;
  for (const Tile* span = begin; span < end; span++)
    for (float* parts : {x.dk_parts, x.dv_parts})
      memset(parts + (tokens + span->query) * wide_D, 0,
             span->num_queries * wide_D * sizeof(float));
  for (const Tile* span = begin; span < end; span++) {
    pack_segment(x, *span, head / x.group, scratch);
    for (int64_t lo = 0; lo < span->num_queries; lo += BLOCK) {
      // without one a key is seen by every query from the first that sees it to the last
      const int64_t window = x.window ? x.window : span->num_keys + BLOCK;
      const int64_t position = span->num_keys - 1 - (span->num_queries - 1 - lo) * x.step;
      QueryBlock block{span->query + lo, std::min<int64_t>(BLOCK, span->num_queries - lo), position,
                       window, std::max<int64_t>(0, position + 1 - window), x.step};
      differentiate_block(x, block, x.key_rows + span->first_key, head, scratch);
    }
  }
  if (x.sinks) x.dsink_parts[tree * x.num_heads() + head] = scratch.dsink;
}

// Adds up the gradient of each head's sink over the trees, in order.
template <class T>
void add_trees(const GradientProblem<T>& x) {
  for (int64_t head = 0; head < x.num_heads(); head++) {
    double sum = 0.0;
    for (int64_t tree = 0; tree < x.num_trees; tree++)
      sum += x.dsink_parts[tree * x.num_heads() + head];
    x.dsinks[head] = (float)sum;
  }
}

// Adds up a key's gradient over the heads that share it.
template <class T>
void add_heads(T* to, const float* parts, const GradientProblem<T>& x, int64_t token) {
  const int64_t D = x.head_dim, wide_D = x.wide_head_dim();
  for (int64_t kv = 0; kv < x.num_kv; kv++)
    for_runs(D, [&](int64_t d, int64_t n) {
      Vec sum = {};
      for (int64_t h = kv * x.group; h < (kv + 1) * x.group; h++)
        sum += load(parts + (h * x.num_tokens + token) * wide_D + d);
      store_run(to + (token * x.num_kv + kv) * D + d, sum, n);
    });
}

template <class T>
void differentiate_attention(GradientProblem<T> x, int64_t threads) {
  const int64_t num_heads = x.num_heads(), num_parts = num_heads * x.num_tokens * x.wide_head_dim();
  thread_local std::vector<float> parts;  // of the calling thread, kept: fresh pages are slow
  if ((int64_t)parts.size() < 2 * num_parts) parts.resize(2 * num_parts);
  x.dk_parts = parts.data(), x.dv_parts = parts.data() + num_parts;
  std::vector<double> sink_parts(x.sinks ? x.num_trees * num_heads : 0);
  x.dsink_parts = sink_parts.data();
  parallel_for(x.num_trees * num_heads, threads, [&](int64_t i) {
    thread_local GradientScratch scratch;
    differentiate_tree(x, i / num_heads, i % num_heads, scratch);
  });
  if (x.sinks) add_trees(x);
  const int64_t size = x.num_tokens * num_heads * x.head_dim;
  parallel_for(x.num_tokens, threads_for(size, threads), [&](int64_t token) {
    add_heads(x.dk, x.dk_parts, x, token);
    add_heads(x.dv, x.dv_parts, x, token);
  });
}
