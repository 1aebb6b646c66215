// Recovers the codes, scales and zero points of a bf16 weight that was dequantised from 4 or 8 bits, as those
// of GGUF files are. The weight is then stored in these bits without any change (`quantized_blocks.h`).
#pragma once

#include <atomic>
#include <cmath>

#include "quantized_blocks.h"

namespace {

constexpr int kNeighbours = 8;  // float16 numbers on either side of a bf16 number that may round to it

inline float from_half(uint16_t bits) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))); }

inline uint16_t to_half(float number) {
  return static_cast<uint16_t>(_mm_extract_epi16(
      _mm_cvtps_ph(_mm_set_ss(number), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), 0));
}

// Calls accept(bits, value) for the float16 numbers around `number`, from the nearest outwards, until it
// returns true. Returns whether it did.
template <class Accept>
inline bool any_neighbour(float number, const Accept& accept) {
  const int middle = to_half(number);
  for (int step = 0; step <= 2 * kNeighbours; step++) {
    const int bits = middle + (step % 2 ? step / 2 + 1 : -step / 2);
    if (bits < 0 || bits > 0xffff || (bits & 0x7c00) == 0x7c00) continue;
    if (accept(static_cast<uint16_t>(bits), from_half(static_cast<uint16_t>(bits)))) return true;
  }
  return false;
}

// Finds the codes of 32 weights: bf16(scale * code + zero), with codes from `lowest` to `highest`. Returns
// false, and writes no codes, if a weight has none.
inline bool encode_block(const bf16* weights, float scale, float zero, float lowest, float highest,
                         int8_t* codes) {
  const __m512 s = _mm512_set1_ps(scale), z = _mm512_set1_ps(zero);
  __m512i found[2];
  for (int half = 0; half < 2; half++) {
    const bf16* from = weights + half * kLanes;
    __m512 code = _mm512_div_ps(_mm512_sub_ps(load(from), z), s);
    code = _mm512_roundscale_ps(code, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    code = _mm512_min_ps(_mm512_max_ps(code, _mm512_set1_ps(lowest)), _mm512_set1_ps(highest));
    const __m256i decoded = (__m256i)_mm512_cvtneps_pbh(_mm512_fmadd_ps(code, s, z));
    const __m256i given = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    if (_mm256_cmpneq_epi16_mask(decoded, given)) return false;
    found[half] = _mm512_cvtps_epi32(code);
  }
  for (int half = 0; half < 2; half++)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + half * kLanes),
                     _mm512_cvtepi32_epi8(found[half]));
  return true;
}

// Finds a block of 4 bits, by trying zero points and scales. Quantisers give code 0 to the smallest weight
// and code 15 to the largest.
inline bool find_four_bits(const bf16* weights, uint16_t* scale, uint16_t* zero, int8_t* codes) {
  const __m512 low = load(weights), high = load(weights + kLanes);
  const float smallest = _mm512_reduce_min_ps(_mm512_min_ps(low, high));
  const float largest = _mm512_reduce_max_ps(_mm512_max_ps(low, high));
  return any_neighbour(smallest, [&](uint16_t zero_bits, float z) {
    if (widened(rounded(z)) != smallest) return false;
    *zero = zero_bits;
    *scale = 0;
    if (smallest == largest) return encode_block(weights, 1.0f, z, 0, 0, codes);
    return any_neighbour((largest - z) / 15, [&](uint16_t scale_bits, float s) {
      *scale = scale_bits;
      return s > 0 && widened(rounded(std::fma(15.0f, s, z))) == largest &&
             encode_block(weights, s, z, 0, 15, codes);
    });
  });
}

// Finds a block of 8 bits without zero point, by trying scales. The largest |weight| has code 127 or -127.
inline bool find_eight_bits(const bf16* weights, uint16_t* scale, uint16_t* zero, int8_t* codes) {
  const float largest = _mm512_reduce_max_ps(
      _mm512_max_ps(_mm512_abs_ps(load(weights)), _mm512_abs_ps(load(weights + kLanes))));
  *zero = *scale = 0;
  if (largest == 0) return encode_block(weights, 1.0f, 0, 0, 0, codes);
  return any_neighbour(largest / 127, [&](uint16_t scale_bits, float s) {
    *scale = scale_bits;
    return s > 0 && widened(rounded(127 * s)) == largest && encode_block(weights, s, 0, -127, 127, codes);
  });
}

}  // namespace

extern "C" {

// Writes the scales and zero points, (outputs, inputs / 32) float16, and codes, (outputs, inputs), of a
// weight in `bits` bits, 4 or 8. Returns whether they give every weight exactly; if not, what it wrote is
// useless.
int32_t moaspec_codes(const bf16* weight, int64_t outputs, int64_t inputs, int64_t bits,
                      uint16_t* scale, uint16_t* zero, int8_t* codes, int32_t threads) {
  const int64_t blocks = outputs * inputs / kBlock;
  std::atomic<bool> exact{true};
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < blocks; i++) {
    if (!exact.load(std::memory_order_relaxed)) continue;
    const auto find = bits == 4 ? find_four_bits : find_eight_bits;
    if (!find(weight + i * kBlock, scale + i, zero + i, codes + i * kBlock)) exact = false;
  }
  return exact;
}

}  // extern "C"
