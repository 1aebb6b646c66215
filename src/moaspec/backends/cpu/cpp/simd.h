// Sixteen float32 numbers at a time: one register of a CPU with AVX512-BF16, two of one with AVX2.
//
// What the kernels need of a CPU is here, under the same names for both. A pair is two neighbouring
// bf16 numbers, the first in the lower half of a word.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace {

using bf16 = uint16_t;

constexpr int kLanes = 16;  // numbers of `Floats`; outputs of a panel

// Calls with the constants 0, 1, ... N - 1: arrays that they index stay in registers.
template <int N, class Visit>
[[gnu::always_inline]] inline void unrolled(const Visit& visit) {
  if constexpr (N > 0) {
    unrolled<N - 1>(visit);
    visit(std::integral_constant<int, N - 1>{});
  }
}

inline float widened(bf16 half) {
  union { uint32_t bits; float number; } cast = {static_cast<uint32_t>(half) << 16};
  return cast.number;
}

// Reads `bytes` bytes into the nearest cache, ahead of their use.
inline void prefetch(const void* from, int64_t bytes) {
  constexpr int64_t kCacheLine = 64;
  for (int64_t line = 0; line < bytes; line += kCacheLine)
    __builtin_prefetch(static_cast<const char*>(from) + line);
}

// The order of 16 inputs in eight bits: a word has four even pairs' first numbers, or their second, ...
alignas(16) constexpr uint8_t kEvenPairsFirst[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

}  // namespace

#ifdef __AVX512BF16__
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif

namespace {

// e to the power of numbers that are at most 0, to float32's precision.
inline Floats exponential(Floats x) {
  x = larger(x, all(-87.0f));
  const Floats n = nearest_whole(x * all(1.44269504f));
  Floats r = subtract_product(n, all(0.693359375f), x);
  r = subtract_product(n, all(-2.12194440e-4f), r);
  // Taylor's series: |r| is at most ln(2) / 2, so the first term left out is below 1e-8.
  Floats sum = all(1.0f / 5040);
  for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = multiply_add(sum, r, all(term));
  return times_power(sum, n);
}

// x * sigmoid(x), by the exponential of what is at most zero.
inline Floats silu(Floats x) {
  const Floats one = all(1.0f);
  const Floats small = exponential(all(0.0f) - magnitude(x));
  return x * (blend(less(x, all(0.0f)), small, one) / (one + small));
}

}  // namespace
