// The divergence of distillation and its gradient, for a row of logits.
//
// PyTorch would pass a dozen times over logits in float32, which no cache holds. A row fits the L2 cache.
#pragma once

#include <algorithm>
#include <cmath>

#include "gemm.h"

namespace {

// Calls visit(i, count, 16 numbers of p, 16 of q) for all numbers of two rows. Lanes from `count` on have the
// numbers `p_rest` and `q_rest`.
template <class Number, class Visit>
[[gnu::always_inline]] inline void for_lanes(const Number* p, const Number* q, int64_t size, float p_rest,
                                             float q_rest, const Visit& visit) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) visit(i, int64_t{kLanes}, load(p + i), load(q + i));
  if (i == size) return;
  Number last_p[kLanes] = {}, last_q[kLanes] = {};
  std::copy(p + i, p + size, last_p);
  std::copy(q + i, q + size, last_q);
  const Mask real = first_lanes(size - i);
  visit(i, size - i, blend(real, load(last_p), broadcast(p_rest)), blend(real, load(last_q), broadcast(q_rest)));
}

inline float as_float(float number) { return number; }
inline float as_float(bf16 half) { return widened(half); }

// Whether the largest numbers of two rows, of equal ones the first, have one place.
template <class Number>
bool same_top(const Number* p, const Number* q, int64_t size, float p_top, float q_top) {
  const Floats of_p = broadcast(p_top), of_q = broadcast(q_top);
  int64_t i = 0;
  while (i + kLanes <= size && !any_equal(load(p + i), of_p) && !any_equal(load(q + i), of_q)) i += kLanes;
  for (; i < size; i++) {
    const bool is_p = as_float(p[i]) == p_top, is_q = as_float(q[i]) == q_top;
    if (is_p || is_q) return is_p && is_q;
  }
  return false;
}

// What `kl_row` finds of a row: sum p (log p - log q), and whether the largest logits of both have one place.
struct RowLoss { float divergence; bool hit; };

// KL(p || q) of the softmax of two rows of logits. Overwrites p's logits by `factor` (q - p), `factor` times the
// gradient by q's logits. Where a logit is not finite, the divergence is not.
template <class Number>
RowLoss kl_row(Number* p, const Number* q, int64_t size, float factor) {
  Floats p_tops = broadcast(-INFINITY), q_tops = p_tops;
  for_lanes(p, q, size, -INFINITY, -INFINITY, [&](int64_t, int64_t, Floats a, Floats b) {
    p_tops = maximum(p_tops, a);
    q_tops = maximum(q_tops, b);
  });
  const float p_top = reduce_max(p_tops), q_top = reduce_max(q_tops);
  const bool hit = same_top(p, q, size, p_top, q_top);
  struct Powers;
  const int64_t padded = (size + kLanes - 1) / kLanes * kLanes;
  float* const p_powers = thread_buffer<Powers, float>(2 * padded);
  float* const q_powers = p_powers + padded;
  Floats p_sums = broadcast(0.0f), q_sums = p_sums, products = p_sums;
  // The exponential of numbers this far below the largest one is next to 0.
  constexpr float kFar = 200.0f;
  for_lanes(p, q, size, p_top - kFar, q_top - kFar, [&](int64_t i, int64_t, Floats a, Floats b) {
    const Floats p_power = exponential(a - broadcast(p_top)), q_power = exponential(b - broadcast(q_top));
    p_sums = p_sums + p_power;
    q_sums = q_sums + q_power;
    products = multiply_add(p_power, a - b, products);
    store(p_powers + i, p_power);
    store(q_powers + i, q_power);
  });
  const float p_sum = reduce_sum(p_sums), q_sum = reduce_sum(q_sums);
  const Floats p_scale = broadcast(factor / p_sum), q_scale = broadcast(factor / q_sum);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats of_q = load(q_powers + i) * q_scale;
    store(p + i, subtract_product(load(p_powers + i), p_scale, of_q), size - i);
  }
  const float log_sums = q_top - p_top + std::log(q_sum) - std::log(p_sum);
  return {reduce_sum(products) / p_sum + log_sums, hit};
}

}  // namespace
