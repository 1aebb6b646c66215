// Integer products (`gguf_integers.h`) with AVX-VNNI, or with AVX2.
#pragma once

#include "simd.h"

namespace {

#ifdef __AVXVNNI__
constexpr bool kSignedBytes = false;  // a byte of a weight is unsigned
#else
constexpr bool kSignedBytes = true;  // of 8 bits and of tables
#endif
constexpr int kIntegerRows = 6;       // rows of a tile
constexpr int kDotLanes = 8;          // outputs of a register of dot products
constexpr int kIntegerPrefetch = 16;  // prefetch distance, in groups

using DotFloats = __m256;

inline void load_to(DotFloats& to, const float* from) { to = _mm256_loadu_ps(from); }
inline void store_from(float* to, DotFloats from) { _mm256_storeu_ps(to, from); }
// sum += numbers * factors.
inline void add_product(DotFloats& sum, const float* numbers, DotFloats factors) {
  sum = _mm256_fmadd_ps(_mm256_loadu_ps(numbers), factors, sum);
}
inline void store_bytes(uint8_t* to, Bytes x) { _mm256_storeu_si256(reinterpret_cast<Bytes*>(to), x); }
inline Bytes flipped(Bytes x, int bits) { return _mm256_xor_si256(x, _mm256_set1_epi8(static_cast<char>(bits))); }
inline Bytes look_up(const uint8_t* table, Bytes indices) {
  const __m128i sixteen = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(sixteen), indices);
}
// Words of 16 bits, shifted right, or left if `by` is negative.
template <int by>
inline Bytes shifted(Bytes words) {
  return by >= 0 ? _mm256_srli_epi16(words, std::max(by, 0)) : _mm256_slli_epi16(words, std::max(-by, 0));
}
// x, with the bits of `mask` of words of 16 bits.
inline Bytes added_bits(Bytes x, Bytes words, int mask) {
  return _mm256_or_si256(x, _mm256_and_si256(words, _mm256_set1_epi16(static_cast<short>(mask))));
}
// Bytes from both places in turns.
inline Bytes interleaved(const uint8_t* first, const uint8_t* second) {
  const auto wide = [](const uint8_t* from) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  };
  return _mm256_or_si256(wide(first), _mm256_slli_epi16(wide(second), 8));
}

// The dot products of a row with 8 outputs. `start`, then `add` with i = 0, 1, ... and all of a scale's inputs.
template <Kind K>
class DotProducts {
 public:
  void start(int32_t number) {
    dots_ = _mm256_set1_epi32(number);
#ifndef __AVXVNNI__
    words_ = _mm256_setzero_si256();
#endif
  }
  template <int i>
  [[gnu::always_inline]] void add(Bytes codes, const int8_t* four) {
    int32_t numbers;
    std::memcpy(&numbers, four, sizeof(numbers));
    const __m256i x = _mm256_set1_epi32(numbers);
#ifdef __AVXVNNI__
    dots_ = _mm256_dpbusd_avx_epi32(dots_, codes, x);
#else
    // Sums of two products each, in 16 bits, which also hold the sums of `kTogether` of these.
    const __m256i two = kIsSigned ? _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))
                                  : _mm256_maddubs_epi16(codes, x);
    words_ = i % kTogether ? _mm256_add_epi16(words_, two) : two;
    if constexpr (i % kTogether == kTogether - 1)
      dots_ = _mm256_add_epi32(dots_, _mm256_madd_epi16(words_, _mm256_set1_epi16(1)));
#endif
  }
  // The dot products times a factor.
  DotFloats times(float factor) const { return _mm256_mul_ps(_mm256_cvtepi32_ps(dots_), repeated(factor)); }

 private:
  using T = KindTraits<K>;
  static constexpr bool kIsSigned = T::kBits == 8 || T::kIsTable;
  // 2 * 127 * (the largest byte) * `kTogether` is at most 32767.
  static constexpr int kTogether = kIsSigned ? 1 : T::kBits == 4 ? 8 : T::kBits == 5 ? 4 : 2;

  __m256i dots_;
#ifndef __AVXVNNI__
  __m256i words_;
#endif
};

}  // namespace
