// Vectors of sixteen float32 numbers: one register with AVX512-BF16, two registers with AVX2.
//
// `simd_avx512.h` and `simd_avx2.h` define the same types and functions, so that the kernels are written
// once. A pair is two neighbouring bf16 numbers in a word of 32 bits, the first in the lower half.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace {

using bf16 = uint16_t;

constexpr int kLanes = 16;  // lanes of `Floats`; outputs of a panel

// Calls `visit` with the constants 0 to N - 1. Arrays that only such constants index stay in registers.
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

// Prefetches `bytes` bytes into the L1 cache.
inline void prefetch(const void* from, int64_t bytes) {
  constexpr int64_t kCacheLine = 64;
  for (int64_t line = 0; line < bytes; line += kCacheLine)
    __builtin_prefetch(static_cast<const char*>(from) + line);
}

// The order of 16 int8 inputs (8 pairs) for W4A8 dot products. Each four fill a word: the first numbers of
// the even pairs, their second numbers, then the first and the second numbers of the odd pairs.
alignas(16) constexpr uint8_t kEvenPairsFirst[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

}  // namespace

#ifdef __AVX512BF16__
#include "simd_avx512.h"
#else
#include "simd_avx2.h"
#endif

namespace {

// e^x for x <= 0, to float32 precision; e^-87 for smaller x.
inline Floats exponential(Floats x) {
  x = maximum(x, broadcast(-87.0f));
  // x = n * ln(2) + r. ln(2) is the sum of two constants, of which the first times n is exact.
  const Floats n = nearest_integer(x * broadcast(1.44269504f));
  Floats r = subtract_product(n, broadcast(0.693359375f), x);
  r = subtract_product(n, broadcast(-2.12194440e-4f), r);
  // Taylor series: |r| <= ln(2) / 2, so the first omitted term is below 1e-8.
  Floats sum = broadcast(1.0f / 5040);
  for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = multiply_add(sum, r, broadcast(term));
  return times_power_of_two(sum, n);
}

// x * sigmoid(x), from e^-|x|, which cannot overflow.
inline Floats silu(Floats x) {
  const Floats one = broadcast(1.0f);
  const Floats power = exponential(broadcast(0.0f) - absolute(x));
  return x * (blend(less(x, broadcast(0.0f)), power, one) / (one + power));
}

}  // namespace
