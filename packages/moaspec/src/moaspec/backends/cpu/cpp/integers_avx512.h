// Integer products (`gguf_integers.h`) with AVX512-VNNI.
#pragma once

#include "simd.h"

namespace {

constexpr bool kSignedBytes = false;  // a byte of a weight is unsigned
constexpr int kIntegerRows = 8;       // rows of a tile
constexpr int kDotLanes = 16;         // outputs of a register of dot products
constexpr int kIntegerPrefetch = 16;  // prefetch distance, in groups

using DotFloats = __m512;

inline void load_to(DotFloats& to, const float* from) { to = _mm512_loadu_ps(from); }
inline void store_from(float* to, DotFloats from) { _mm512_storeu_ps(to, from); }
// sum += numbers * factors.
inline void add_product(DotFloats& sum, const float* numbers, DotFloats factors) {
  sum = _mm512_fmadd_ps(_mm512_loadu_ps(numbers), factors, sum);
}
inline void store_bytes(uint8_t* to, Bytes x) { _mm512_storeu_si512(to, x); }
inline Bytes flipped(Bytes x, int bits) { return _mm512_xor_si512(x, _mm512_set1_epi8(static_cast<char>(bits))); }
inline Bytes look_up(const uint8_t* table, Bytes indices) {
  const __m128i sixteen = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen), indices);
}
// Words of 16 bits, shifted right, or left if `by` is negative.
template <int by>
inline Bytes shifted(Bytes words) {
  return by >= 0 ? _mm512_srli_epi16(words, std::max(by, 0)) : _mm512_slli_epi16(words, std::max(-by, 0));
}
// x, with the bits of `mask` of words of 16 bits.
inline Bytes added_bits(Bytes x, Bytes words, int mask) {
  return _mm512_ternarylogic_epi32(x, words, _mm512_set1_epi16(static_cast<short>(mask)), 0xf8);
}
// Bytes from both places in turns.
inline Bytes interleaved(const uint8_t* first, const uint8_t* second) {
  const auto wide = [](const uint8_t* from) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  };
  return _mm512_or_si512(wide(first), _mm512_slli_epi16(wide(second), 8));
}

// The dot products of a row with 16 outputs.
template <Kind K>
class DotProducts {
 public:
  void start(int32_t number) { dots_ = _mm512_set1_epi32(number); }
  template <int i>
  [[gnu::always_inline]] void add(Bytes codes, const int8_t* four) {
    int32_t numbers;
    std::memcpy(&numbers, four, sizeof(numbers));
    dots_ = _mm512_dpbusd_epi32(dots_, codes, _mm512_set1_epi32(numbers));
  }
  // The dot products times a factor.
  DotFloats times(float factor) const { return _mm512_mul_ps(_mm512_cvtepi32_ps(dots_), repeated(factor)); }

 private:
  __m512i dots_;
};

}  // namespace
