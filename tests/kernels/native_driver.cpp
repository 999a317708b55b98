// The C++ kernels on the processor this was compiled for: near fp64's results, and a row's bits a
// function of the row alone. Needs nothing but the compiler, so it runs in an emulator too. Prints
// one line a claim that fails, then a digest of all results; exits with 1 if any failed.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <thread>

#include "attention_gradient.h"
#include "decoder.h"
#include "int8.h"
#include "logits.h"
#include "product.h"
#include "vision_rows.h"

struct Random {  // PCG's multiplier; the same numbers everywhere
  uint64_t state;
  float next() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (float)((int64_t)(state >> 40) - (1 << 23)) / (1 << 22);  // [-2, 2)
  }
};

int num_failed = 0;
uint64_t digest = 14695981039346656037ull;

void check(bool holds, const char* claim, const char* type, int64_t a, int64_t b) {
  if (holds) return;
  num_failed++;
  printf("failed: %s, %s, %lld, %lld\n", claim, type, (long long)a, (long long)b);
}

double wide(float x) { return x; }
double wide(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}
void set(float& to, float x) { to = x; }
void set(bf16& to, float x) {  // truncates: any value will do
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  to.bits = (uint16_t)(bits >> 16);
}

template <class T>
constexpr bool IS_HALF = sizeof(T) == 2;
template <class T>
const char* name() {
  return IS_HALF<T> ? "bf16" : "fp32";
}

template <class T>
std::vector<T> numbers(int64_t n, uint64_t seed) {
  Random random{seed};
  std::vector<T> x(n);
  for (T& value : x) set(value, random.next());
  return x;
}

template <class T>
void add_to_digest(const std::vector<T>& x) {
  const unsigned char* bytes = (const unsigned char*)x.data();
  for (size_t i = 0; i < x.size() * sizeof(T); i++) digest = (digest ^ bytes[i]) * 1099511628211ull;
}

template <class T>
bool is_same(const T* a, const T* b, int64_t n) {
  return memcmp(a, b, n * sizeof(T)) == 0;
}
// `size`: of the terms that were summed in fp32.
template <class T>
bool is_near(T ours, double exact, double size) {
  double half_ulp = IS_HALF<T> ? 1.0 / 256 : 0;
  return std::abs(wide(ours) - exact) <= half_ulp * std::abs(exact) * 1.01 + 4e-6 * size + 1e-6;
}

template <class T>
PackedWeight<T, float> weight_of(const std::vector<float>& packed, const std::vector<T>& bias) {
  return {packed.data(), nullptr, bias.data()};
}

template <class T>
void test_linear(int64_t inputs, int64_t outputs) {
  const int64_t most = 70;
  const auto x = numbers<T>(most * inputs, 1), weight = numbers<T>(inputs * outputs, 2);
  const auto bias = numbers<T>(outputs, 3);
  const int64_t panels = ceil_of(outputs, PANEL), words = inputs / PER_PACKED_WORD<T>;
  std::vector<float> packed(panels * words * PANEL);
  pack(packed.data(), weight.data(), inputs, outputs, 1);
  std::vector<T> alone(most * outputs), y(most * outputs);
  for (int64_t r = 0; r < most; r++)
    linear(&alone[r * outputs], &x[r * inputs], weight_of(packed, bias), 1, inputs, outputs, inputs,
           1);
  for (int64_t r = 0; r < most; r += 23)
    for (int64_t o = 0; o < outputs; o++) {
      double exact = wide(bias[o]), size = 0;
      for (int64_t i = 0; i < inputs; i++) {
        double product = wide(x[r * inputs + i]) * wide(weight[o * inputs + i]);
        exact += product, size += std::abs(product);
      }
      check(is_near(alone[r * outputs + o], exact, size), "a product is fp64's", name<T>(), r, o);
    }
  for (int64_t rows : {2, 3, 5, 8, 9, 31, 70})
    for (int64_t threads : {1, 2, 3, 7, 16}) {
      linear(y.data(), x.data(), weight_of(packed, bias), rows, inputs, outputs, inputs, threads);
      check(is_same(y.data(), alone.data(), rows * outputs), "a row has the same bits in any batch",
            name<T>(), rows, threads);
    }
  add_to_digest(alone);
}

// Weights of int8, and the same turned round for dx = (dy * scale) . weight.
template <class T>
void test_int8(int64_t inputs, int64_t outputs) {
  const int64_t most = 70, words = ceil_of(inputs, PER_WORD<T>), width = words * PER_WORD<T>;
  const auto x = numbers<T>(most * width, 60), bias = numbers<T>(outputs, 61);
  auto scale = numbers<float>(outputs, 62);
  std::vector<int8_t> weight(inputs * outputs), back(inputs * outputs);
  for (size_t i = 0; i < weight.size(); i++) weight[i] = (int8_t)((int64_t)i * 37 % 255 - 127);
  std::vector<int8_t> packed(ceil_of(outputs, PANEL) * PANEL * width, 99);
  pack_int8<T>(packed.data(), weight.data(), inputs, outputs, 2);
  unpack_int8<T>(back.data(), packed.data(), inputs, outputs, 2);
  check(back == weight, "a weight is what was packed", name<T>(), inputs, outputs);
  const PackedWeight<T, int8_t> matrix{packed.data(), scale.data(), bias.data()};
  std::vector<T> alone(most * outputs), y(most * outputs);
  for (int64_t r = 0; r < most; r++)
    linear(&alone[r * outputs], &x[r * width], matrix, 1, width, outputs, width, 1);
  auto is_exact = [&](T ours, const T* input, int64_t step, int64_t count, auto factor, double b) {
    double exact = b, size = std::abs(b);
    for (int64_t i = 0; i < count; i++) {
      const double product = wide(input[i * step]) * factor(i);
      exact += product, size += std::abs(product);
    }
    return is_near(ours, exact, size);
  };
  for (int64_t r = 0; r < most; r += 23)
    for (int64_t o = 0; o < outputs; o++) {
      auto value = [&](int64_t i) { return weight[o * inputs + i] * (double)scale[o]; };
      check(is_exact(alone[r * outputs + o], &x[r * width], 1, inputs, value, wide(bias[o])),
            "a product with int8 is fp64's", name<T>(), r, o);
    }
  for (int64_t rows : {2, 3, 5, 8, 9, 31, 70})
    for (int64_t threads : {1, 2, 3, 7, 16}) {
      linear(y.data(), x.data(), matrix, rows, width, outputs, width, threads);
      check(is_same(y.data(), alone.data(), rows * outputs),
            "a row of a product with int8 has the same bits in any batch", name<T>(), rows, threads);
    }
  add_to_digest(alone);
  const int64_t height = ceil_of(outputs, PER_WORD<T>) * PER_WORD<T>;
  const auto dy = numbers<T>(most * height, 63);
  std::vector<int8_t> columns(ceil_of(inputs, PANEL) * PANEL * height, 99);
  transpose_int8<T>(columns.data(), packed.data(), inputs, outputs, 3);
  std::vector<T> dx(most * inputs);
  linear(dx.data(), dy.data(), PackedWeight<T, int8_t>{columns.data(), nullptr, nullptr}, most, height,
         inputs, height, 3);
  for (int64_t r = 0; r < most; r += 23)
    for (int64_t i = 0; i < inputs; i++) {
      auto value = [&](int64_t o) { return (double)weight[o * inputs + i]; };
      check(is_exact(dx[r * inputs + i], &dy[r * height], 1, outputs, value, 0),
            "a product with int8 turned round is fp64's", name<T>(), r, i);
    }
}

// A change of two of a matrix' modules, the first of rank 3 and the second of rank 5.
template <class T>
void test_low_rank() {
  const int64_t rows = 37, inputs = 34, outputs = 97, rank = 8;
  const auto x = numbers<T>(rows * inputs, 70), base = numbers<T>(rows * outputs, 71);
  const auto low = numbers<float>(rank * inputs, 72);
  const auto first = numbers<float>(50 * 3, 73), second = numbers<float>(40 * 5, 74);
  auto packed = [](const std::vector<float>& weight, int64_t num_in, int64_t num_out) {
    std::vector<float> panels(ceil_of(num_out, PANEL) * num_in * PANEL);
    pack(panels.data(), weight.data(), num_in, num_out, 1);
    return panels;
  };
  const auto a = packed(low, inputs, rank), b = packed(first, 3, 50), c = packed(second, 5, 40);
  const LowRankPart parts[] = {{b.data(), 2, 50, 3}, {c.data(), 55, 40, 5}};
  const LowRank change{a.data(), rank, parts, 2};
  auto whole = base;
  add_low_rank(whole.data(), x.data(), change, rows, inputs, outputs, inputs, 3);
  auto alone = base;
  for (int64_t r = 0; r < rows; r++)
    add_low_rank(&alone[r * outputs], &x[r * inputs], change, 1, inputs, outputs, inputs, 1);
  check(is_same(whole.data(), alone.data(), rows * outputs),
        "a row with a low-rank change has the same bits in any batch", name<T>(), 0, 0);
  for (int64_t r = 0; r < rows; r += 6)
    for (int64_t o = 0; o < outputs; o++) {
      double exact = wide(base[r * outputs + o]), size = std::abs(exact);
      for (int64_t p = 0, k = 0; p < 2; k += parts[p++].rank)
        for (int64_t j = 0; j < parts[p].rank; j++) {
          const int64_t at = o - parts[p].begin;
          if (at < 0 || at >= parts[p].width) continue;
          const double high = (p == 0 ? first : second)[at * parts[p].rank + j];
          for (int64_t i = 0; i < inputs; i++) {
            const double product = wide(x[r * inputs + i]) * low[(k + j) * inputs + i] * high;
            exact += product, size += std::abs(product);
          }
        }
      check(is_near(whole[r * outputs + o], exact, 3 * size), "a low-rank change is fp64's", name<T>(), r, o);
    }
  add_to_digest(whole);
}

// dx = dy . weight and dw += dy^T . x.
template <class T>
void test_products(int64_t rows, int64_t inputs, int64_t outputs) {
  const auto x = numbers<T>(rows * inputs, 40), dy = numbers<T>(rows * outputs, 41);
  const auto weight = numbers<T>(inputs * outputs, 42);
  const int64_t panels = ceil_of(inputs, PANEL), words = ceil_of(outputs, PER_PACKED_WORD<T>);
  std::vector<float> packed(panels * words * PANEL);
  pack_columns(packed.data(), weight.data(), outputs, inputs, inputs, 2);
  std::vector<T> dx(rows * inputs);
  linear(dx.data(), dy.data(), PackedWeight<T, float>{packed.data(), nullptr, nullptr}, rows, outputs,
         inputs, outputs, 3);
  for (int64_t r = 0; r < rows; r += 37)
    for (int64_t i = 0; i < inputs; i++) {
      double exact = 0, size = 0;
      for (int64_t o = 0; o < outputs; o++) {
        double product = wide(dy[r * outputs + o]) * wide(weight[o * inputs + i]);
        exact += product, size += std::abs(product);
      }
      check(is_near(dx[r * inputs + i], exact, size), "dx is fp64's", name<T>(), r, i);
    }
  const auto before = numbers<float>(inputs * outputs, 43);
  auto dw = before;
  add_product(dw.data(), dy.data(), x.data(), rows, outputs, inputs, outputs, inputs, inputs, 1);
  for (int64_t o = 0; o < outputs; o += 7)
    for (int64_t i = 0; i < inputs; i++) {
      double exact = before[o * inputs + i], size = std::abs(exact);
      for (int64_t r = 0; r < rows; r++) {
        double product = wide(dy[r * outputs + o]) * wide(x[r * inputs + i]);
        exact += product, size += std::abs(product);
      }
      check(is_near<float>(dw[o * inputs + i], exact, size), "dw is fp64's", name<T>(), o, i);
    }
  for (int64_t threads : {2, 5}) {
    auto again = before;
    add_product(again.data(), dy.data(), x.data(), rows, outputs, inputs, outputs, inputs, inputs,
                threads);
    check(is_same(again.data(), dw.data(), (int64_t)dw.size()), "dw has the same bits on any threads",
          name<T>(), rows, threads);
  }
  add_to_digest(dx);
  add_to_digest(dw);
}

// A cache of blocks of LANES tokens, heads first, whose keys lie in runs. What is not written is NaN.
template <class T>
struct RunCache {
  int64_t kv, D, blocks;
  std::vector<T> k, v;
  RunCache(int64_t tokens, int64_t kv, int64_t D)
      : kv(kv), D(D), blocks(ceil_of(tokens, LANES)), k(blocks * LANES * kv * D), v(k.size()) {
    memset(k.data(), 0xff, k.size() * sizeof(T)), memset(v.data(), 0xff, v.size() * sizeof(T));
  }
  // The row of a sequence's token, whose first block is the last.
  int64_t row(int64_t i) const { return (blocks - 1 - i / LANES) * kv * LANES + i % LANES; }
};

template <class T>
void test_attention(int64_t D, int64_t group, int64_t window) {
  const int64_t tokens = 139, kv = 2, heads = kv * group;
  const auto q = numbers<T>(tokens * heads * D, 4), k = numbers<T>(tokens * kv * D, 5);
  const auto v = numbers<T>(tokens * kv * D, 6);
  std::vector<int32_t> rows(tokens);
  for (int64_t i = 0; i < tokens; i++) rows[i] = (int32_t)(tokens - 1 - i);  // keys lie backwards
  std::vector<T> o(tokens * heads * D), whole(tokens * heads * D);
  const float scale = 0.125f;
  Problem<T> problem{o.data(), q.data(), k.data(), v.data(), rows.data(), kv, group, D, heads * D,
                     kv * D, kv * D, D, D, scale, window};
  auto attend_by = [&](int32_t queries, int64_t threads) {
    std::vector<Tile> tiles;
    for (int32_t t = 0; t < tokens; t += queries) {
      int32_t n = t + queries < tokens ? queries : (int32_t)tokens - t;
      tiles.push_back({t, n, t + n, 0, 1, 0});
    }
    attend(problem, tiles.data(), (int64_t)tiles.size(), threads);
  };
  attend_by(1, 1);
  whole = o;
  add_to_digest(whole);
  for (int32_t queries : {2, 3, 5, 8, 24}) {
    attend_by(queries, queries == 5 ? 3 : 1);
    check(is_same(o.data(), whole.data(), (int64_t)o.size()), "a query has the same bits in any tile",
          name<T>(), D, queries);
  }
  std::vector<Tile> team;  // each of the last queries alone, over keys that all of them see
  const int32_t shared = 96, rest = (int32_t)tokens - shared;
  for (int32_t t = shared; t < tokens; t++)
    team.push_back({t, 1, t + 1, 0, t == shared ? rest : 0, t == shared ? shared : 0});
  std::fill(o.begin(), o.end(), T());
  attend(problem, team.data(), (int64_t)team.size(), 2);
  check(is_same(&o[shared * heads * D], &whole[shared * heads * D], rest * heads * D),
        "a query has the same bits in any team", name<T>(), D, window);
  if (D % PER_WORD<T> == 0) {
    RunCache<T> cache(tokens, kv, D);
    std::vector<int64_t> stored(tokens);
    for (int64_t i = 0; i < tokens; i++) stored[rows[i]] = cache.row(i);
    store_kv(cache.k.data(), cache.v.data(), k.data(), v.data(), stored.data(), tokens, kv, D,
             kv * D, kv * D, LANES, 1);
    for (int64_t i = 0; i < tokens; i++) rows[i] = (int32_t)cache.row(i);
    const Problem<T> packed = problem;
    problem = {o.data(), q.data(), cache.k.data(), cache.v.data(), rows.data(), kv, group, D,
               heads * D, D, D, LANES * D, LANES * D, scale, window, 1};
    for (int32_t queries : {1, 3, 24}) {
      attend_by(queries, queries == 3 ? 2 : 1);
      check(is_same(o.data(), whole.data(), (int64_t)o.size()),
            "a query has the same bits over keys in runs", name<T>(), D, queries);
    }
    std::fill(o.begin(), o.end(), T());
    attend(problem, team.data(), (int64_t)team.size(), 2);
    check(is_same(&o[shared * heads * D], &whole[shared * heads * D], rest * heads * D),
          "a team has the same bits over keys in runs", name<T>(), D, window);
    problem = packed;
    for (int64_t i = 0; i < tokens; i++) rows[i] = (int32_t)(tokens - 1 - i);
  }
  for (int64_t t = 0; t < tokens; t += 46)
    for (int64_t h = 0; h < heads; h++) {
      std::vector<double> p(t + 1), exact(D);
      double sum = 0;
      const int64_t first = window ? std::max<int64_t>(0, t + 1 - window) : 0;
      for (int64_t j = first; j <= t; j++) {
        for (int64_t d = 0; d < D; d++)
          p[j] += wide(q[(t * heads + h) * D + d]) * wide(k[(rows[j] * kv + h / group) * D + d]);
        sum += p[j] = std::exp(p[j] * scale);
      }
      for (int64_t d = 0; d < D; d++) {
        for (int64_t j = first; j <= t; j++)
          exact[d] += p[j] / sum * wide(v[(rows[j] * kv + h / group) * D + d]);
        check(is_near(whole[(t * heads + h) * D + d], exact[d], 2), "attention is fp64's", name<T>(),
              t, d);
      }
    }
}

// Of a tree of three segments, the last two of which continue the first, and of a sequence beside it.
template <class T>
void test_attention_gradient(int64_t D, int64_t group, int64_t window, int64_t step = 1) {
  const int64_t tokens = 139, kv = 2, heads = kv * group;
  const Tile segments[] = {{0, 37, 37, 0, 1, 0},
                           {37, 70, 107, 37, 1, 0},
                           {107, 9, 46, 144, 1, 0},
                           {116, 23, 23, 190, 1, 0}};
  const int32_t trees[] = {0, 3, 4};
  std::vector<int32_t> rows;
  for (const Tile& s : segments) {
    for (int32_t i = 0; i < s.num_keys - s.num_queries; i++) rows.push_back(i);
    for (int32_t i = 0; i < s.num_queries; i++) rows.push_back(s.query + i);
  }
  const auto q = numbers<T>(tokens * heads * D, 44), k = numbers<T>(tokens * kv * D, 45);
  const auto v = numbers<T>(tokens * kv * D, 46), grad = numbers<T>(tokens * heads * D, 47);
  std::vector<T> o(tokens * heads * D), dq(o.size()), dk(k.size()), dv(v.size());
  const float scale = 0.125f;
  Problem<T> forward{o.data(), q.data(), k.data(), v.data(), rows.data(), kv, group, D, heads * D,
                     kv * D, kv * D, D, D, scale, window};
  forward.step = step;
  attend(forward, segments, 4, 1);
  GradientProblem<T> problem{dq.data(), dk.data(), dv.data(), q.data(), k.data(), v.data(), o.data(),
                             grad.data(), rows.data(), segments, trees, 2, tokens, kv, group, D,
                             heads * D, kv * D, kv * D, heads * D, scale, window, nullptr, nullptr};
  problem.step = step;
  differentiate_attention(problem, 1);
  std::vector<double> exact_q(dq.size()), exact_k(dk.size()), exact_v(dv.size());
  for (const Tile& s : segments)
    for (int64_t i = 0; i < s.num_queries; i++)
      for (int64_t h = 0; h < heads; h++) {
        const int64_t end = s.num_keys - (s.num_queries - 1 - i) * step;
        const int64_t at = ((s.query + i) * heads + h) * D;
        const int64_t first = window ? std::max<int64_t>(0, end - window) : 0;
        auto key = [&](int64_t j) { return (rows[s.first_key + j] * kv + h / group) * D; };
        std::vector<double> p(end), dp(end);
        double sum = 0, delta = 0;
        for (int64_t j = first; j < end; j++) {
          for (int64_t d = 0; d < D; d++) {
            p[j] += wide(q[at + d]) * wide(k[key(j) + d]) * scale;
            dp[j] += wide(grad[at + d]) * wide(v[key(j) + d]);
          }
          sum += p[j] = std::exp(p[j]);
        }
        for (int64_t j = first; j < end; j++) delta += (p[j] /= sum) * dp[j];
        for (int64_t j = first; j < end; j++)
          for (int64_t d = 0; d < D; d++) {
            const double ds = p[j] * (dp[j] - delta) * scale;
            exact_q[at + d] += ds * wide(k[key(j) + d]);
            exact_k[key(j) + d] += ds * wide(q[at + d]);
            exact_v[key(j) + d] += p[j] * wide(grad[at + d]);
          }
      }
  auto check_near = [&](const std::vector<T>& ours, const std::vector<double>& exact) {
    double largest = 0;
    for (double x : exact) largest = std::max(largest, std::abs(x));
    const double limit = IS_HALF<T> ? 1.0 / 64 : 1e-5;  // o, and P and dS where pairs are multiplied
    for (size_t i = 0; i < exact.size(); i++)
      check(std::abs(wide(ours[i]) - exact[i]) <= limit * largest, "attention's gradient is fp64's",
            name<T>(), D, (int64_t)i);
  };
  check_near(dq, exact_q), check_near(dk, exact_k), check_near(dv, exact_v);
  add_to_digest(dq), add_to_digest(dk), add_to_digest(dv);
  const auto whole_q = dq, whole_k = dk, whole_v = dv;
  auto check_same = [&](const char* claim, int64_t from, int64_t by) {
    check(is_same(&dq[from * heads * D], &whole_q[from * heads * D], (tokens - from) * heads * D) &&
              is_same(&dk[from * kv * D], &whole_k[from * kv * D], (tokens - from) * kv * D) &&
              is_same(&dv[from * kv * D], &whole_v[from * kv * D], (tokens - from) * kv * D),
          claim, name<T>(), D, by);
  };
  for (int64_t threads : {2, 3, 7}) {
    differentiate_attention(problem, threads);
    check_same("a gradient has the same bits on any threads", 0, threads);
  }
  for (auto* x : {&dq, &dk, &dv}) memset(x->data(), 0, x->size() * sizeof(T));
  problem.trees = trees + 1, problem.num_trees = 1;
  differentiate_attention(problem, 1);
  check_same("a sequence alone has the gradient it has beside a tree", 116, 0);
}

template <class T>
void test_row_gradients() {
  const int64_t rows = 71, size = 37;
  const auto x = numbers<T>(rows * size, 50), dy = numbers<T>(rows * size, 51);
  const auto dtotal = numbers<T>(rows * size, 52), weight = numbers<T>(size, 53);
  const auto gate_up = numbers<T>(rows * 2 * size, 54);
  std::vector<T> y(rows * size), dx(rows * size), dweight(size), dgate_up(2 * rows * size);
  std::vector<float> rstd(rows);
  rms_norm(y.data(), rstd.data(), x.data(), weight.data(), rows, 1, size, size, 1e-5f, 1);
  differentiate_rms_norm(dx.data(), dweight.data(), dy.data(), x.data(), weight.data(), rstd.data(),
                         dtotal.data(), rows, 1, size, size, 1);
  differentiate_swiglu(dgate_up.data(), dy.data(), gate_up.data(), rows, size, 1);
  std::vector<double> exact_weight(size);
  for (int64_t r = 0; r < rows; r++) {
    double sum = 0, mean = 0;
    for (int64_t i = r * size; i < (r + 1) * size; i++) sum += wide(x[i]) * wide(x[i]);
    const double scale = 1 / std::sqrt(sum / size + 1e-5);
    for (int64_t i = 0; i < size; i++)
      mean += wide(dy[r * size + i]) * wide(weight[i]) * wide(x[r * size + i]) * scale / size;
    for (int64_t i = 0; i < size; i++) {
      const double normed = wide(x[r * size + i]) * scale, up = wide(dy[r * size + i]);
      const double exact = scale * (up * wide(weight[i]) - normed * mean) + wide(dtotal[r * size + i]);
      check(is_near(dx[r * size + i], exact, 10), "a norm's gradient is fp64's", name<T>(), r, i);
      exact_weight[i] += up * normed;
      const double gate = wide(gate_up[2 * r * size + i]), sigmoid = 1 / (1 + std::exp(-gate));
      const double linear = wide(gate_up[(2 * r + 1) * size + i]);
      const double slope = sigmoid * (1 + gate * (1 - sigmoid));
      check(is_near(dgate_up[2 * r * size + i], up * linear * slope, 4) &&
                is_near(dgate_up[(2 * r + 1) * size + i], up * gate * sigmoid, 4),
            "swiglu's gradient is fp64's", name<T>(), r, i);
    }
  }
  for (int64_t i = 0; i < size; i++)
    check(is_near(dweight[i], exact_weight[i], 4.0 * rows), "a norm's weight has fp64's gradient",
          name<T>(), 0, i);
  add_to_digest(dx), add_to_digest(dweight), add_to_digest(dgate_up);

  const int64_t vocab = 203, num_ids = 3, places = 5;
  auto logits = numbers<T>(places * vocab, 55);
  const auto before = logits;
  const std::vector<int64_t> ids{5, 202, 5, 0, 1, 2, 7, 7, 7, 16, 15, 100, 31, 32, 33};
  const auto dlogp = numbers<float>(places * num_ids, 56), dentropy = numbers<float>(places, 57);
  std::vector<float> logp(places), lse(places), entropy(places);
  score(logits.data(), places, vocab, vocab, 0.7f, ids.data(), logp.data(), lse.data(),
        entropy.data(), 1);
  differentiate_scores(logits.data(), places, vocab, vocab, 0.7f, ids.data(), num_ids, lse.data(),
                       entropy.data(), dlogp.data(), dentropy.data(), 1);
  for (int64_t r = 0; r < places; r++) {
    double sum = 0, exact_entropy = 0, total = 0;
    for (int64_t i = 0; i < vocab; i++) sum += std::exp(wide(before[r * vocab + i]) / 0.7);
    auto log_p = [&](int64_t i) { return wide(before[r * vocab + i]) / 0.7 - std::log(sum); };
    for (int64_t i = 0; i < vocab; i++) exact_entropy -= std::exp(log_p(i)) * log_p(i);
    for (int64_t m = 0; m < num_ids; m++) total += dlogp[r * num_ids + m];
    for (int64_t i = 0; i < vocab; i++) {
      double exact = std::exp(log_p(i)) * (-total - dentropy[r] * (log_p(i) + exact_entropy));
      for (int64_t m = 0; m < num_ids; m++)
        if (ids[r * num_ids + m] == i) exact += dlogp[r * num_ids + m];
      check(is_near(logits[r * vocab + i], exact / 0.7, 4), "a logit's gradient is fp64's",
            name<T>(), r, i);
    }
  }
}

// Tokens one at a time, through a cache, have the bits of all of them at once. Rows have no whole
// number of vectors, so that the last part of each is met as well.
// Layer norm with a bias and GELU.
template <class T>
void test_vision_rows() {
  const int64_t rows = 67, size = 37;
  const auto x = numbers<T>(rows * size, 70), dy = numbers<T>(rows * size, 71);
  const auto weight = numbers<T>(size, 72), bias = numbers<T>(size, 73);
  std::vector<T> y(rows * size), dx(y.size()), again(y.size()), dw(size), db(size);
  std::vector<float> mean(rows), rstd(rows);
  const float eps = 1e-5f;
  layer_norm(y.data(), mean.data(), rstd.data(), x.data(), weight.data(), bias.data(), rows, size,
             eps, 3);
  differentiate_layer_norm(dx.data(), dw.data(), db.data(), dy.data(), x.data(), weight.data(),
                           mean.data(), rstd.data(), rows, size, 3);
  std::vector<double> exact_w(size), exact_b(size), size_w(size);
  for (int64_t r = 0; r < rows; r++) {
    const T *row = &x[r * size], *d = &dy[r * size];
    double m = 0, squares = 0, g_mean = 0, gn_mean = 0;
    for (int64_t i = 0; i < size; i++) m += wide(row[i]) / size;
    for (int64_t i = 0; i < size; i++) squares += (wide(row[i]) - m) * (wide(row[i]) - m) / size;
    const double inverse = 1 / std::sqrt(squares + eps);
    auto normed = [&](int64_t i) { return (wide(row[i]) - m) * inverse; };
    for (int64_t i = 0; i < size; i++) {
      g_mean += wide(d[i]) * wide(weight[i]) / size;
      gn_mean += wide(d[i]) * wide(weight[i]) * normed(i) / size;
    }
    for (int64_t i = 0; i < size; i++) {
      const double g = wide(d[i]) * wide(weight[i]);
      check(is_near(y[r * size + i], normed(i) * wide(weight[i]) + wide(bias[i]), 8),
            "a layer norm is fp64's", name<T>(), r, i);
      check(is_near(dx[r * size + i], (g - g_mean - normed(i) * gn_mean) * inverse, 16),
            "a layer norm's gradient is fp64's", name<T>(), r, i);
      exact_w[i] += wide(d[i]) * normed(i), exact_b[i] += wide(d[i]);
      size_w[i] += std::abs(wide(d[i]) * normed(i)) + std::abs(wide(d[i]));
    }
    layer_norm(&again[r * size], &mean[r], &rstd[r], row, weight.data(), bias.data(), 1, size, eps, 1);
  }
  check(is_same(again.data(), y.data(), rows * size), "a row has the same bits in any batch",
        name<T>(), rows, size);
  for (int64_t i = 0; i < size; i++) {
    check(is_near(dw[i], exact_w[i], size_w[i]), "a norm's weight's gradient is fp64's", name<T>(), 0, i);
    check(is_near(db[i], exact_b[i], size_w[i]), "a norm's bias's gradient is fp64's", name<T>(), 0, i);
  }
  add_to_digest(y), add_to_digest(dx), add_to_digest(dw), add_to_digest(db);
  for (int is_tanh : {0, 1}) {
    is_tanh ? gelu<true>(y.data(), x.data(), rows * size, 3) : gelu<false>(y.data(), x.data(), rows * size, 3);
    is_tanh ? differentiate_gelu<true>(dx.data(), dy.data(), x.data(), rows * size, 3)
            : differentiate_gelu<false>(dx.data(), dy.data(), x.data(), rows * size, 3);
    for (int64_t i = 0; i < rows * size; i++) {
      const double v = wide(x[i]), c = std::sqrt(8 / M_PI);
      double below = std::erfc(-v / std::sqrt(2.0)) / 2, slope = std::exp(-v * v / 2) / std::sqrt(2 * M_PI);
      if (is_tanh) {
        below = 1 / (1 + std::exp(-c * (v + 0.044715 * v * v * v)));
        slope = below * (1 - below) * c * (1 + 3 * 0.044715 * v * v);
      }
      check(is_near(y[i], v * below, 0.1), "gelu is fp64's", name<T>(), is_tanh, i);
      check(is_near(dx[i], wide(dy[i]) * (below + v * slope), 0.1), "gelu's gradient is fp64's",
            name<T>(), is_tanh, i);
    }
    for (int64_t i = 0; i < rows * size; i++)
      is_tanh ? gelu<true>(&again[i], &x[i], 1, 1) : gelu<false>(&again[i], &x[i], 1, 1);
    check(is_same(again.data(), y.data(), rows * size), "an element of gelu has the same bits anywhere",
          name<T>(), is_tanh, 0);
    add_to_digest(y), add_to_digest(dx);
  }
}

template <class T>
void test_decoder() {
  const int64_t E = 52, H = 6, K = 2, D = 20, F = 74, tokens = 19, num_layers = 2;
  const Switches switches[] = {{0, 1}, {6, 0}};
  const int64_t width = (H + 2 * K) * D;
  std::vector<std::vector<T>> held;
  std::vector<std::vector<float>> matrices;
  uint64_t seed = 10;
  auto vector_of = [&](int64_t n) { return held.emplace_back(numbers<T>(n, seed++)).data(); };
  auto matrix_of = [&](int64_t inputs, int64_t outputs) {
    auto weight = numbers<T>(inputs * outputs, seed++);
    matrices.emplace_back(ceil_of(outputs, PANEL) * inputs * PANEL);
    pack(matrices.back().data(), weight.data(), inputs, outputs, 1);
    return matrices.back().data();
  };
  held.reserve(64), matrices.reserve(64);
  std::vector<Layer<T>> layers;
  for (int64_t i = 0; i < num_layers; i++)
    layers.push_back({vector_of(E), {matrix_of(E, width), nullptr, vector_of(width), nullptr}, vector_of(D),
                      vector_of(D), {matrix_of(H * D, E), nullptr, nullptr, nullptr}, vector_of(E),
                      {matrix_of(E, 2 * F), nullptr, nullptr, nullptr}, {matrix_of(F, E), nullptr, nullptr, nullptr},
                      vector_of(tokens * K * D), vector_of(tokens * K * D)});
  const T* last_norm = vector_of(E);
  const auto cos = numbers<float>(tokens * D / 2, 7), sin = numbers<float>(tokens * D / 2, 8);
  std::vector<int64_t> cache_rows(tokens);
  std::vector<int32_t> key_rows(tokens);
  for (int64_t i = 0; i < tokens; i++) cache_rows[i] = i * K, key_rows[i] = (int32_t)i;
  struct Order {
    int64_t row, head, head_rows, has_key_runs;
  } order{K * D, D, 1, 0};
  auto run = [&](std::vector<T>& x, int64_t first, int64_t n, int64_t threads) {
    Sizes sizes{n, E, H, K, D, F, order.row, order.head, order.head_rows, order.has_key_runs};
    Tile tile{0, (int32_t)n, (int32_t)(first + n), 0, 1, 0};
    Step<T> step{&cos[first * D / 2], &sin[first * D / 2], &cache_rows[first], key_rows.data(), &tile,
                 1};
    Buffers<T> none{};
    std::vector<T> scratch(none.lay_out(sizes));
    decode(&x[first * E], layers.data(), switches, num_layers, last_norm, sizes, step, scratch.data(),
           1e-5f, 0.25f, 0.7f, threads);
  };
  const auto embedded = numbers<T>(tokens * E, 9);
  auto whole = embedded, apart = embedded;
  run(whole, 0, tokens, 1);
  for (int64_t t = 0; t < tokens; t++) run(apart, t, 1, 1);
  check(is_same(whole.data(), apart.data(), tokens * E), "decoding has the bits of prefill",
        name<T>(), 0, 0);
  auto chunked = embedded;
  run(chunked, 0, 7, 2);
  run(chunked, 7, tokens - 7, 3);
  check(is_same(whole.data(), chunked.data(), tokens * E), "a chunk has the bits of the whole",
        name<T>(), 0, 0);
  for (const T& value : whole) check(std::isfinite(wide(value)), "finite", name<T>(), 0, 0);
  std::vector<RunCache<T>> caches(num_layers, RunCache<T>(tokens, K, D));
  for (int64_t i = 0; i < num_layers; i++)
    layers[i].k_cache = caches[i].k.data(), layers[i].v_cache = caches[i].v.data();
  for (int64_t i = 0; i < tokens; i++)
    cache_rows[i] = caches[0].row(i), key_rows[i] = (int32_t)cache_rows[i];
  order = {D, LANES * D, LANES, 1};
  apart = embedded;
  run(apart, 0, 5, 2);
  for (int64_t t = 5; t < tokens; t++) run(apart, t, 1, 1);
  check(is_same(whole.data(), apart.data(), tokens * E), "keys in runs have the bits of rows",
        name<T>(), 0, 0);
  add_to_digest(whole);
}

template <class T>
void test_rows() {
  const int64_t rows = 3, size = 2 * 37;
  const auto x = numbers<T>(rows * size, 30), weight = numbers<T>(size, 31);
  std::vector<T> y(rows * size), h(rows * size / 2);
  std::vector<float> rstd(rows);
  rms_norm(y.data(), rstd.data(), x.data(), weight.data(), rows, 1, size, size, 1e-5f, 1);
  swiglu(h.data(), x.data(), rows, size / 2, 1);
  for (int64_t r = 0; r < rows; r++) {
    double sum = 0;
    for (int64_t i = 0; i < size; i++) sum += wide(x[r * size + i]) * wide(x[r * size + i]);
    for (int64_t i = 0; i < size; i++) {
      double exact = wide(x[r * size + i]) / std::sqrt(sum / size + 1e-5) * wide(weight[i]);
      check(is_near(y[r * size + i], exact, 1), "a norm is fp64's", name<T>(), r, i);
    }
    for (int64_t i = 0; i < size / 2; i++) {
      double gate = wide(x[r * size + i]), up = wide(x[r * size + size / 2 + i]);
      check(is_near(h[r * size / 2 + i], gate / (1 + std::exp(-gate)) * up, 1), "swiglu is fp64's",
            name<T>(), r, i);
    }
  }
  add_to_digest(y);
  add_to_digest(h);

  const int64_t vocab = 1003;
  const auto logits = numbers<T>(rows * vocab, 32);
  std::vector<int64_t> ids{5, 1002, 77}, drawn(rows);
  std::vector<double> u{0.0, 0.5, 0.999};
  std::vector<float> logp(rows), lse(rows), entropy(rows), of_drawn(rows);
  score(logits.data(), rows, vocab, vocab, 0.7f, ids.data(), logp.data(), lse.data(), entropy.data(),
        1);
  pick(logits.data(), rows, vocab, vocab, 0.7f, u.data(), drawn.data(), of_drawn.data(), 1);
  for (int64_t r = 0; r < rows; r++) {
    double sum = 0, mean = 0, below = 0;
    for (int64_t i = 0; i < vocab; i++) {
      double z = wide(logits[r * vocab + i]) / 0.7, weight = std::exp(z);
      sum += weight, mean += weight * z;
      if (i < drawn[r]) below += weight;
    }
    double chosen = std::exp(wide(logits[r * vocab + drawn[r]]) / 0.7);
    double exact = wide(logits[r * vocab + ids[r]]) / 0.7 - std::log(sum);
    check(std::abs(logp[r] - exact) < 2e-5, "a log-prob is fp64's", name<T>(), r, 0);
    check(std::abs(entropy[r] - (std::log(sum) - mean / sum)) < 2e-5, "an entropy is fp64's",
          name<T>(), r, 0);
    check(below <= u[r] * sum * (1 + 1e-6) && (below + chosen) * (1 + 1e-6) >= u[r] * sum,
          "a draw is where u falls", name<T>(), r, drawn[r]);
  }
}

// Every item is done once, whoever calls at the same time, and in a forked child.
void test_pool() {
  auto run_jobs = [](uint64_t seed, int64_t jobs) {
    Random random{seed};
    int64_t wrong = 0;
    for (int64_t job = 0; job < jobs; job++) {
      const int64_t items = (int64_t)((random.next() + 2) * 40), threads = 2 + job % 4;
      std::vector<std::atomic<int>> counts(items);
      int64_t sum = 0;  // of the caller's own, read right after the call
      parallel_for(items, threads, [&](int64_t i) {
        for (volatile int spin = 0; spin < (i % 7) * 20; spin = spin + 1) {}
        counts[i]++;
      });
      for (auto& count : counts) sum += count == 1;
      wrong += sum != items;
    }
    return wrong;
  };
  std::vector<int64_t> wrong(3);
  std::vector<std::thread> callers;
  for (int64_t c = 0; c < 3; c++)
    callers.emplace_back([&, c] { wrong[c] = run_jobs(50 + c, 4000); });
  for (auto& caller : callers) caller.join();
  for (int64_t c = 0; c < 3; c++) check(wrong[c] == 0, "every item is done once", "", c, wrong[c]);
#if defined(__x86_64__)  // QEMU, in which the other processors run, cannot fork with threads
  const pid_t child = fork();
  if (child == 0) _exit(run_jobs(60, 200) != 0);
  int status = 1;
  waitpid(child, &status, 0);
  check(status == 0, "a forked child has threads of its own", "", status, 0);
#endif
}

// A decoding step of 32 sequences keeps up to 32 threads busy: what each is given, counted.
void test_shares() {
  const int64_t rows = 32;
  for (int64_t outputs : {576, 960, 3072})
    for (int64_t threads = 1; threads <= 32; threads++) {
      const Cut cut = choose_cut(rows, outputs, threads);
      std::vector<int64_t> shares(threads);
      const int64_t tasks = num_tasks(cut, rows, outputs);
      for (int64_t share = 0; share < threads; share++)
        for (int64_t task = ThreadPool::first_of(share, tasks, threads);
             task < ThreadPool::first_of(share + 1, tasks, threads); task++) {
          const Block block = block_of(task, cut, rows, outputs);
          shares[share] += (block.end - block.row) * block.num_columns;
        }
      int64_t most = *std::max_element(shares.begin(), shares.end()), all = 0;
      for (int64_t share : shares) all += share;
      check(all == rows * outputs, "tasks cover the product", "", outputs, threads);
      check(most * threads <= 1.2 * all, "no thread has a fifth more than its share", "", outputs,
            threads);
    }
}

template <class T>
void test_all() {
  test_linear<T>(34, 97);
  test_linear<T>(146, 255);  // enough to be shared among threads
  test_int8<T>(33, 97);
  test_int8<T>(146, 255);
  test_low_rank<T>();
  test_products<T>(70, 41, 98);
  test_products<T>(1070, 61, 18);  // a second chunk of the sum
  for (int64_t D : {64, 40, 7}) test_attention<T>(D, 3, 0);
  test_attention<T>(16, 1, 0);
  for (int64_t window : {1, 33, 90}) test_attention<T>(40, 2, window);
  for (int64_t D : {64, 40, 7}) test_attention_gradient<T>(D, 3, 0);
  test_attention_gradient<T>(16, 1, 0);
  for (int64_t window : {5, 33}) test_attention_gradient<T>(40, 2, window);
  for (int64_t D : {64, 7}) test_attention_gradient<T>(D, 2, 0, 0);  // all see all
  test_vision_rows<T>();
  test_decoder<T>();
  test_rows<T>();
  test_row_gradients<T>();
}

int main() {
  test_pool();
  test_shares();
  test_all<float>();
  test_all<bf16>();
  printf("lanes %d, digest %016llx\n", LANES, (unsigned long long)digest);
  return num_failed > 0;
}
