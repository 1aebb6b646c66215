// The vectors of `simd.h` with AVX512-BF16, where one instruction multiplies and accumulates 16 pairs.
#pragma once

#include <immintrin.h>

namespace {

using Floats = __m512;
using Mask = __mmask16;
using Words = __m512i;  // 16 words of 32 bits
using Pairs = __m512bh; // a pair of weights for each of 16 outputs
using Pair = __m512bh;  // a pair of inputs, broadcast to all lanes
using Input = bf16;     // type of the inputs of bf16 products

constexpr int kBf16Rows = 6;  // rows of a tile: 6 * 4 sums, 4 of weights and an input fit 32 registers
constexpr int bf16_panels(int) { return 4; }
constexpr int kPrefetchPairs = 32;   // prefetch distance of bf16 weights, in pairs
constexpr int kRegisterQueries = 8;  // queries whose sums stay in registers
constexpr int kValueRegisters = 2;   // registers of sums for each of these queries, in attention to values
constexpr int kW4A8Rows = 6;  // rows of a tile; sums of more leave too few registers for codes and inputs

inline Floats broadcast(float number) { return _mm512_set1_ps(number); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load(const bf16* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline Mask first_lanes(int64_t count) {
  return count >= kLanes ? 0xffff : static_cast<Mask>((1u << count) - 1);
}

inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline void store(bf16* to, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
}
// Store the first `count` lanes.
inline void store(float* to, Floats x, int64_t count) { _mm512_mask_storeu_ps(to, first_lanes(count), x); }
inline void store(bf16* to, Floats x, int64_t count) {
  _mm256_mask_storeu_epi16(to, first_lanes(count), (__m256i)_mm512_cvtneps_pbh(x));
}

inline bf16 rounded(float number) {
  return static_cast<bf16>(
      _mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(number)), 0));
}

// Fused a * b + c and c - a * b: one rounding.
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats subtract_product(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats absolute(Floats x) { return _mm512_abs_ps(x); }
inline Floats nearest_integer(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
// x * 2^power, for integers from -126 to 0.
inline Floats times_power_of_two(Floats x, Floats power) { return _mm512_scalef_ps(x, power); }
inline float reduce_sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline float reduce_max(Floats x) { return _mm512_reduce_max_ps(x); }

inline Mask less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline bool any_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ) != 0; }
inline bool all(Mask lanes) { return lanes == 0xffff; }
inline Floats blend(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }
inline void masked_store(int32_t* to, Mask mask, int32_t number) {
  _mm512_mask_storeu_epi32(to, mask, _mm512_set1_epi32(number));
}
// Mask of the nonzero bytes among the first `count`. Does not read further bytes.
inline Mask nonzero(const uint8_t* from, int64_t count) {
  const __m128i bytes = _mm_maskz_loadu_epi8(first_lanes(count), from);
  return _mm_test_epi8_mask(bytes, bytes);
}
// Stores the lanes of the mask without gaps and returns their number. Overwrites 16 numbers of `to`.
inline int compress(float* to, Mask mask, Floats x) {
  // Compressing straight to memory takes a hundred cycles on some CPUs.
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(mask, x));
  return __builtin_popcount(mask);
}

inline Pairs pairs(Words words) { return (Pairs)words; }
inline Pair pair(const bf16* from) {
  int both;
  __builtin_memcpy(&both, from, sizeof(both));
  return (Pair)_mm512_set1_epi32(both);
}
inline Floats multiply_add(Pair a, Pairs b, Floats c) { return _mm512_dpbf16_ps(c, a, b); }

inline Words words(const void* from) { return _mm512_loadu_si512(from); }
inline Words zero_words() { return _mm512_setzero_si512(); }

inline void as_inputs(const bf16* from, int64_t count, Input* to) {
  __builtin_memcpy(to, from, count * sizeof(bf16));
}

// Accumulates the products of one pair of inputs of M rows, `stride` inputs apart, with the weights of V
// panels, `panel_stride` bytes apart.
template <int M, int V>
inline void add_products(const Input* x, int64_t stride, const uint8_t* panels, int64_t panel_stride,
                         Floats (&sums)[M][V]) {
  Pairs weights[V];
  for (int v = 0; v < V; v++) weights[v] = pairs(words(panels + v * panel_stride));
  for (int m = 0; m < M; m++) {
    const Pair both = pair(x + m * stride);
    for (int v = 0; v < V; v++) sums[m][v] = multiply_add(both, weights[v], sums[m][v]);
  }
}

// Registers of W4A8 products. An output has two lanes, one for each number of a pair, so 16 outputs take
// `kParts` registers.
using Register = __m512;
using Bytes = __m512i;
constexpr int kParts = 2;

inline Register repeated(float number) { return _mm512_set1_ps(number); }
// The first number in even lanes, the second in odd lanes.
inline Register repeated(const float (&both)[2]) {
  double bits;
  __builtin_memcpy(&bits, both, sizeof(bits));
  return _mm512_castpd_ps(_mm512_set1_pd(bits));
}
inline Bytes bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Bytes low_nibbles(Bytes both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes both) { return low_nibbles(_mm512_srli_epi16(both, 4)); }

// The sums over i of dot products of four bytes: in each lane those of codes[i], and of x[i] the first four
// bytes for even lanes, the last four for odd lanes.
inline Register dot_products(const Bytes (&codes)[4], const int8_t (&x)[4][8]) {
  __m512i sums = _mm512_setzero_si512();
  unrolled<4>([&](auto i) {
    int64_t both;
    __builtin_memcpy(&both, x[i], sizeof(both));
    sums = _mm512_dpbusd_epi32(sums, codes[i], _mm512_set1_epi64(both));
  });
  return _mm512_cvtepi32_ps(sums);
}

// Loads 16 float16 numbers, each into two neighbouring lanes.
inline void load_halves_twice(const uint8_t* halves, Register to[kParts]) {
  const __m512 all = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
  const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  to[0] = _mm512_permutexvar_ps(twice, all);
  to[1] = _mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(8)), all);
}

// The 16 outputs: sums of lanes 2 i and 2 i + 1.
inline Floats add_lane_pairs(const Register (&parts)[kParts]) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
  return _mm512_permutex2var_ps(parts[0], even, parts[1]) + _mm512_permutex2var_ps(parts[0], odd, parts[1]);
}

// Rounds to the nearest int8, saturated, and stores these in an order. The result for NaN and infinity is unspecified.
inline void store_int8(int8_t* to, Floats x, const uint8_t (&order_of)[16] = kEvenPairsFirst) {
  const __m128i order = _mm_load_si128(reinterpret_cast<const __m128i*>(order_of));
  const __m128i nearest = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(nearest, order));
}

// Transposes 16 rows of 16 words in place.
inline void transpose(Words rows[kLanes]) {
  __m512i even[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    even[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    even[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(even[i], even[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(even[i], even[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(even[i + 1], even[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(even[i + 1], even[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    even[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    even[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    even[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    even[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    rows[i] = _mm512_shuffle_i32x4(even[i], even[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(even[i], even[i + 8], 0xdd);
  }
}

}  // namespace
