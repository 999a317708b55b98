// The kernels under plain C names, one for fp32 and one for bf16. Sizes and strides count elements;
// kernels/cpp/ops.py says what the arguments are.
#include "adamw.h"
#include "attention.h"
#include "attention_gradient.h"
#include "checksum.h"
#include "decoder.h"
#include "int8.h"
#include "linear.h"
#include "logits.h"
#include "low_rank.h"
#include "product.h"
#include "rows.h"
#include "rows_gradient.h"
#include "truncate.h"
#include "vision_rows.h"

#define ROW_OPS(T, SUFFIX)                                                                        \
  extern "C" void rms_norm_##SUFFIX(T* y, float* rstd, const T* x, const T* weight,              \
                                    int64_t tokens, int64_t heads, int64_t size,                 \
                                    int64_t x_stride, float eps, int64_t threads) {              \
    rms_norm(y, rstd, x, weight, tokens, heads, size, x_stride, eps, threads);                   \
  }                                                                                               \
  extern "C" void add_rms_norm_##SUFFIX(T* y, T* total, float* rstd, const T* x,                 \
                                        const T* residual, const T* weight, int64_t rows,        \
                                        int64_t size, float eps, int64_t threads) {              \
    add_rms_norm(y, total, rstd, x, residual, weight, rows, size, eps, threads);                 \
  }                                                                                               \
  extern "C" void swiglu_##SUFFIX(T* y, const T* gate_up, int64_t rows, int64_t size,            \
                                  int64_t threads) {                                              \
    swiglu(y, gate_up, rows, size, threads);                                                      \
  }                                                                                               \
  extern "C" void differentiate_rms_norm_##SUFFIX(                                                \
      T* dx, T* dweight, const T* dy, const T* x, const T* weight, const float* rstd,             \
      const T* dtotal, int64_t tokens, int64_t heads, int64_t size, int64_t x_stride,             \
      int64_t threads) {                                                                          \
    differentiate_rms_norm(dx, dweight, dy, x, weight, rstd, dtotal, tokens, heads, size,         \
                           x_stride, threads);                                                    \
  }                                                                                               \
  extern "C" void differentiate_swiglu_##SUFFIX(T* grad, const T* dy, const T* gate_up,          \
                                                int64_t rows, int64_t size, int64_t threads) {    \
    differentiate_swiglu(grad, dy, gate_up, rows, size, threads);                                 \
  }                                                                                               \
  extern "C" void rope_##SUFFIX(T* q_out, T* k_out, const T* q, const T* k, const float* cos,    \
                                const float* sin, int64_t tokens, int64_t q_heads,               \
                                int64_t k_heads, int64_t half, int64_t q_stride,                 \
                                int64_t k_stride, int64_t threads) {                             \
    rope(q_out, k_out, q, k, cos, sin, tokens, q_heads, k_heads, half, q_stride, k_stride,       \
         threads);                                                                                \
  }                                                                                               \
  extern "C" void store_kv_##SUFFIX(T* k_cache, T* v_cache, const T* k, const T* v,              \
                                    const int64_t* rows, int64_t tokens, int64_t heads,          \
                                    int64_t size, int64_t k_stride, int64_t v_stride,            \
                                    int64_t head_rows, int64_t has_key_runs) {                    \
    store_kv(k_cache, v_cache, k, v, rows, tokens, heads, size, k_stride, v_stride, head_rows,    \
             has_key_runs);                                                                       \
  }

#define LINEAR(T, SUFFIX)                                                                        \
  extern "C" void linear_##SUFFIX(T* y, const T* x, const float* packed, const T* bias,         \
                                  int64_t rows, int64_t inputs, int64_t outputs,                 \
                                  int64_t x_stride, int64_t threads) {                           \
    linear(y, x, PackedWeight<T, float>{packed, nullptr, bias}, rows, inputs, outputs,           \
           x_stride, threads);                                                                   \
  }                                                                                              \
  extern "C" void linear_int8_##SUFFIX(T* y, const T* x, const int8_t* packed,                  \
                                       const float* scale, const T* bias, int64_t rows,          \
                                       int64_t inputs, int64_t outputs, int64_t x_stride,        \
                                       int64_t threads) {                                        \
    linear(y, x, PackedWeight<T, int8_t>{packed, scale, bias}, rows, inputs, outputs, x_stride,  \
           threads);                                                                             \
  }                                                                                              \
  extern "C" void add_low_rank_##SUFFIX(T* y, const T* x, const LowRank* change, int64_t rows,  \
                                        int64_t inputs, int64_t outputs, int64_t x_stride,       \
                                        int64_t threads) {                                       \
    add_low_rank(y, x, *change, rows, inputs, outputs, x_stride, threads);                       \
  }                                                                                              \
  extern "C" int64_t int8_word_##SUFFIX() { return PER_WORD<T>; }                               \
  extern "C" void pack_int8_##SUFFIX(int8_t* packed, const int8_t* weight, int64_t inputs,      \
                                     int64_t outputs, int64_t threads) {                         \
    pack_int8<T>(packed, weight, inputs, outputs, threads);                                      \
  }                                                                                              \
  extern "C" void unpack_int8_##SUFFIX(int8_t* weight, const int8_t* packed, int64_t inputs,    \
                                       int64_t outputs, int64_t threads) {                       \
    unpack_int8<T>(weight, packed, inputs, outputs, threads);                                    \
  }                                                                                              \
  extern "C" void transpose_int8_##SUFFIX(int8_t* columns, const int8_t* packed,                \
                                          int64_t inputs, int64_t outputs, int64_t threads) {    \
    transpose_int8<T>(columns, packed, inputs, outputs, threads);                                \
  }                                                                                              \
  extern "C" void linear_unpacked_##SUFFIX(T* y, const T* x, const T* weight, const T* bias,    \
                                           int64_t rows, int64_t inputs, int64_t outputs,        \
                                           int64_t x_stride, int64_t threads) {                  \
    linear_unpacked(y, x, weight, bias, rows, inputs, outputs, x_stride, threads);               \
  }                                                                                              \
  extern "C" int64_t panel_##SUFFIX() { return PANEL; }                                         \
  extern "C" void pack_##SUFFIX(float* packed, const T* weight, int64_t inputs,                 \
                                int64_t outputs, int64_t threads) {                              \
    pack(packed, weight, inputs, outputs, threads);                                              \
  }                                                                                              \
  extern "C" void pack_columns_##SUFFIX(float* packed, const T* weight, int64_t rows,           \
                                        int64_t columns, int64_t stride, int64_t threads) {      \
    pack_columns(packed, weight, rows, columns, stride, threads);                                \
  }                                                                                              \
  extern "C" void add_product_##SUFFIX(float* total, const T* a, const T* b, int64_t rows,      \
                                       int64_t m, int64_t n, int64_t a_stride,                   \
                                       int64_t b_stride, int64_t total_stride,                   \
                                       int64_t threads) {                                        \
    add_product(total, a, b, rows, m, n, a_stride, b_stride, total_stride, threads);             \
  }



#define ATTENTION(T, SUFFIX)                                                                      \
  extern "C" void attend_##SUFFIX(                                                                \
      T* o, const T* q, const T* k, const T* v, const int32_t* key_rows, const Tile* tiles,       \
      int64_t num_tiles, int64_t num_kv, int64_t group, int64_t head_dim, int64_t q_stride,       \
      int64_t k_row, int64_t v_row, int64_t k_head, int64_t v_head, float scale,                  \
      int64_t window, int64_t has_key_runs, const float* sinks, int64_t threads) {                \
    Problem<T> problem{o,     q,     k,      v,        key_rows, num_kv, group,  head_dim,         \
                       q_stride, k_row, v_row, k_head, v_head,   scale,  window, has_key_runs,     \
                       sinks};                                                                     \
    attend(problem, tiles, num_tiles, threads);                                                   \
  }                                                                                               \
  extern "C" int64_t run_keys_##SUFFIX() { return LANES; }                                        \
  extern "C" int64_t run_word_##SUFFIX() { return PER_WORD<T>; }                                  \
  extern "C" void differentiate_attention_##SUFFIX(                                               \
      T* dq, T* dk, T* dv, const T* q, const T* k, const T* v, const T* o, const T* grad,         \
      const int32_t* key_rows, const Tile* spans, const int32_t* trees, int64_t num_trees,        \
      int64_t num_tokens, int64_t num_kv, int64_t group, int64_t head_dim, int64_t q_stride,      \
      int64_t k_stride, int64_t v_stride, int64_t grad_stride, float scale, int64_t window,       \
      const float* sinks, float* dsinks, int64_t threads) {                                       \
    GradientProblem<T> problem{dq,       dk,       dv,         q,          k,        v,           \
                               o,        grad,     key_rows,   spans,      trees,    num_trees,   \
                               num_tokens, num_kv, group,      head_dim,   q_stride, k_stride,    \
                               v_stride, grad_stride, scale,   window,     {},       {},          \
                               sinks,    dsinks};                                                 \
    differentiate_attention(problem, threads);                                                    \
  }



#define LOGIT_OPS(T, SUFFIX)                                                                     \
  extern "C" void score_##SUFFIX(const T* logits, int64_t rows, int64_t size, int64_t stride,   \
                                 float temperature, const int64_t* ids, float* logp, float* lse, \
                                 float* entropy, int64_t threads) {                              \
    score(logits, rows, size, stride, temperature, ids, logp, lse, entropy, threads);            \
  }                                                                                              \
  extern "C" void differentiate_scores_##SUFFIX(                                                 \
      T* logits, int64_t rows, int64_t size, int64_t stride, float temperature,                  \
      const int64_t* ids, int64_t num_ids, const float* lse, const float* entropy,               \
      const float* dlogp, const float* dentropy, int64_t threads) {                              \
    differentiate_scores(logits, rows, size, stride, temperature, ids, num_ids, lse, entropy,    \
                         dlogp, dentropy, threads);                                              \
  }                                                                                              \
  extern "C" void pick_##SUFFIX(const T* logits, int64_t rows, int64_t size, int64_t stride,    \
                                float temperature, const double* u, int64_t* token, float* logp, \
                                int64_t threads) {                                               \
    pick(logits, rows, size, stride, temperature, u, token, logp, threads);                      \
  }                                                                                              \
  extern "C" void pick_kept_##SUFFIX(                                                            \
      const T* logits, int64_t rows, int64_t size, int64_t stride, float temperature,            \
      const int64_t* top_k, const double* top_p, const double* min_p, const double* u,           \
      int64_t* token, float* logp, float* kept_logp, int64_t threads) {                          \
    pick_kept(logits, rows, size, stride, temperature, top_k, top_p, min_p, u, token, logp,      \
              kept_logp, threads);                                                               \
  }                                                                                              \
  extern "C" void likeliest_##SUFFIX(const T* logits, int64_t rows, int64_t size,                \
                                     int64_t stride, float temperature, const int64_t* counts,   \
                                     int64_t width, int64_t* ids, float* logp,                   \
                                     int64_t threads) {                                          \
    likeliest(logits, rows, size, stride, temperature, counts, width, ids, logp, threads);       \
  }

#define UPDATE(T, SUFFIX)                                                                        \
  extern "C" void adamw_##SUFFIX(T* weight, Remainder* rest, const float* grad, float* mean,     \
                                 float* square, int64_t size, const AdamW* by, int64_t threads) {\
    adamw(weight, rest, grad, mean, square, size, *by, threads);                                 \
  }

#define DECODER(T, SUFFIX)                                                                       \
  extern "C" void decode_##SUFFIX(T* x, const Layer<T>* layers, const Switches* switches,        \
                                  int64_t num_layers, const T* last_norm, const Sizes* sizes,    \
                                  const Step<T>* step, T* scratch, float eps, float scale,       \
                                  float multiplier, int64_t threads) {                           \
    decode(x, layers, switches, num_layers, last_norm, *sizes, *step, scratch, eps, scale,       \
           multiplier, threads);                                                                 \
  }                                                                                              \
  extern "C" int64_t decode_scratch_##SUFFIX(const Sizes* sizes) {                               \
    Buffers<T> none{};                                                                           \
    return none.lay_out(*sizes);                                                                 \
  }

#define VISION(T, SUFFIX)                                                                         \
  extern "C" void layer_norm_##SUFFIX(T* y, float* mean, float* rstd, const T* x,                \
                                      const T* weight, const T* bias, int64_t rows,              \
                                      int64_t size, float eps, int64_t threads) {                \
    layer_norm(y, mean, rstd, x, weight, bias, rows, size, eps, threads);                        \
  }                                                                                               \
  extern "C" void differentiate_layer_norm_##SUFFIX(                                              \
      T* dx, T* dweight, T* dbias, const T* dy, const T* x, const T* weight, const float* mean,   \
      const float* rstd, int64_t rows, int64_t size, int64_t threads) {                           \
    differentiate_layer_norm(dx, dweight, dbias, dy, x, weight, mean, rstd, rows, size, threads); \
  }                                                                                               \
  extern "C" void gelu_##SUFFIX(T* y, const T* x, int64_t size, int64_t is_tanh,                 \
                                int64_t threads) {                                                \
    is_tanh ? gelu<true>(y, x, size, threads) : gelu<false>(y, x, size, threads);                 \
  }                                                                                               \
  extern "C" void differentiate_gelu_##SUFFIX(T* dx, const T* dy, const T* x, int64_t size,      \
                                              int64_t is_tanh, int64_t threads) {                \
    is_tanh ? differentiate_gelu<true>(dx, dy, x, size, threads)                                  \
            : differentiate_gelu<false>(dx, dy, x, size, threads);                                \
  }                                                                                               \
  extern "C" void attend_whole_##SUFFIX(                                                          \
      T* o, const T* q, const T* k, const T* v, const int32_t* key_rows, const Tile* tiles,       \
      int64_t num_tiles, int64_t num_kv, int64_t group, int64_t head_dim, int64_t q_stride,       \
      int64_t k_stride, int64_t v_stride, float scale, int64_t threads) {                         \
    Problem<T> problem{o,        q,        k,        v,        key_rows, num_kv, group, head_dim, \
                       q_stride, k_stride, v_stride, head_dim, head_dim, scale,  0,     0};       \
    problem.step = 0;                                                                             \
    attend(problem, tiles, num_tiles, threads);                                                   \
  }                                                                                               \
  extern "C" void differentiate_whole_##SUFFIX(                                                   \
      T* dq, T* dk, T* dv, const T* q, const T* k, const T* v, const T* o, const T* grad,         \
      const int32_t* key_rows, const Tile* spans, const int32_t* trees, int64_t num_trees,        \
      int64_t num_tokens, int64_t num_kv, int64_t group, int64_t head_dim, int64_t q_stride,      \
      int64_t k_stride, int64_t v_stride, int64_t grad_stride, float scale, int64_t threads) {    \
    GradientProblem<T> problem{dq,         dk,       dv,       q,           k,     v,             \
                               o,          grad,     key_rows, spans,       trees, num_trees,     \
                               num_tokens, num_kv,   group,    head_dim,    q_stride, k_stride,   \
                               v_stride,   grad_stride, scale, 0,           {},    {}};           \
    problem.step = 0;                                                                             \
    differentiate_attention(problem, threads);                                                    \
  }

ROW_OPS(float, f32)
ROW_OPS(bf16, bf16)
LINEAR(float, f32)
LINEAR(bf16, bf16)
ATTENTION(float, f32)
ATTENTION(bf16, bf16)
LOGIT_OPS(float, f32)
LOGIT_OPS(bf16, bf16)
UPDATE(float, f32)
UPDATE(bf16, bf16)
DECODER(float, f32)
DECODER(bf16, bf16)
VISION(float, f32)
VISION(bf16, bf16)

extern "C" void for_ranges_raw(int64_t num, char* const* to, const char* const* from,
                               const int64_t* num_bytes, const int64_t* elements, int64_t* sums,
                               int64_t* is_finite, int64_t threads) {
  for_ranges(num, to, from, num_bytes, elements, sums, is_finite, threads);
}
