// Finding, on CPUs with AVX512-BF16, the few bits that a bf16 weight was made of, where it was made of few:
// of files whose weights are scale * code + zero, that were widened since.
#pragma once

#include <atomic>
#include <cmath>

#include "quantized_blocks.h"

namespace {

constexpr int kNearby = 8;  // float16 numbers on either side that may round to one bf16 number

inline float from_half(uint16_t bits) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))); }

inline uint16_t to_half(float number) {
  return static_cast<uint16_t>(_mm_extract_epi16(
      _mm_cvtps_ph(_mm_set_ss(number), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), 0));
}

// `take(float16's bits, number)` for the numbers around one, until it answers true.
template <class Take>
inline bool any_nearby(float number, const Take& take) {
  const int middle = to_half(number);
  for (int step = 0; step <= 2 * kNearby; step++) {
    const int bits = middle + (step % 2 ? step / 2 + 1 : -step / 2);
    if (bits < 0 || bits > 0xffff || (bits & 0x7c00) == 0x7c00) continue;
    if (take(static_cast<uint16_t>(bits), from_half(static_cast<uint16_t>(bits)))) return true;
  }
  return false;
}

// Whether 32 numbers are scale * code + zero, rounded, of codes within the limits; those then.
inline bool coded(const bf16* weights, float scale, float zero, float lowest, float highest,
                  int8_t* codes) {
  const __m512 s = _mm512_set1_ps(scale), z = _mm512_set1_ps(zero);
  __m512i found[2];
  for (int half = 0; half < 2; half++) {
    const bf16* from = weights + half * kLanes;
    __m512 code = _mm512_div_ps(_mm512_sub_ps(load(from), z), s);
    code = _mm512_roundscale_ps(code, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    code = _mm512_min_ps(_mm512_max_ps(code, _mm512_set1_ps(lowest)), _mm512_set1_ps(highest));
    const __m256i again = (__m256i)_mm512_cvtneps_pbh(_mm512_fmadd_ps(code, s, z));
    const __m256i given = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    if (_mm256_cmpneq_epi16_mask(again, given)) return false;
    found[half] = _mm512_cvtps_epi32(code);
  }
  for (int half = 0; half < 2; half++)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + half * kLanes),
                     _mm512_cvtepi32_epi8(found[half]));
  return true;
}

// Four bits whose smallest and largest weights have the codes 0 and 15, as quantisers leave them.
inline bool in_four_bits(const bf16* weights, uint16_t* scale, uint16_t* zero, int8_t* codes) {
  const __m512 low = load(weights), high = load(weights + kLanes);
  const float smallest = _mm512_reduce_min_ps(_mm512_min_ps(low, high));
  const float largest = _mm512_reduce_max_ps(_mm512_max_ps(low, high));
  return any_nearby(smallest, [&](uint16_t zero_bits, float z) {
    if (widened(rounded(z)) != smallest) return false;
    *zero = zero_bits;
    *scale = 0;
    if (smallest == largest) return coded(weights, 1.0f, z, 0, 0, codes);
    return any_nearby((largest - z) / 15, [&](uint16_t scale_bits, float s) {
      *scale = scale_bits;
      return s > 0 && widened(rounded(std::fma(15.0f, s, z))) == largest &&
             coded(weights, s, z, 0, 15, codes);
    });
  });
}

// Eight bits without a zero; the largest code is 127 or -127.
inline bool in_eight_bits(const bf16* weights, uint16_t* scale, uint16_t* zero, int8_t* codes) {
  const float largest = _mm512_reduce_max_ps(
      _mm512_max_ps(_mm512_abs_ps(load(weights)), _mm512_abs_ps(load(weights + kLanes))));
  *zero = *scale = 0;
  if (largest == 0) return coded(weights, 1.0f, 0, 0, 0, codes);
  return any_nearby(largest / 127, [&](uint16_t scale_bits, float s) {
    *scale = scale_bits;
    return s > 0 && widened(rounded(127 * s)) == largest && coded(weights, s, 0, -127, 127, codes);
  });
}

}  // namespace

extern "C" {

// What each block of a weight was made of in `bits` bits: scales and zeros (outputs, inputs / 32) in
// float16, codes (outputs, inputs). Returns whether every weight is exactly that.
int32_t moaspec_codes(const bf16* weight, int64_t outputs, int64_t inputs, int64_t bits,
                      uint16_t* scale, uint16_t* zero, int8_t* codes, int32_t threads) {
  const int64_t blocks = outputs * inputs / kBlock;
  std::atomic<bool> exact{true};
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < blocks; i++) {
    if (!exact.load(std::memory_order_relaxed)) continue;
    const auto find = bits == 4 ? in_four_bits : in_eight_bits;
    if (!find(weight + i * kBlock, scale + i, zero + i, codes + i * kBlock)) exact = false;
  }
  return exact;
}

}  // extern "C"
