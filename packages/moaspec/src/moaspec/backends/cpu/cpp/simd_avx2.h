// The vectors of `simd.h` with AVX2 and FMA. Pairs are widened to float32; the products of their first
// numbers are accumulated before those of their second numbers.
#pragma once

#include <immintrin.h>

#include <cstring>

namespace {

// Sixteen lanes in two registers.
struct Floats { __m256 part[2]; };
struct Mask { __m256 part[2]; };  // all bits of a lane are set, or none
struct Words { __m256i part[2]; };  // 16 words of 32 bits
struct Pairs { __m256 first[2], second[2]; };  // a pair of weights for each of 16 outputs, in float32
using Input = float;  // type of the inputs of bf16 products: a row is widened once for all weights

constexpr int kBf16Rows = 6;  // rows of a tile: 6 * 2 sums, 2 of weights, input and mask fill 16 registers
// Panels of a tile. Each is a stream from memory, and a CPU prefetches several streams faster than one.
constexpr int bf16_panels(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
constexpr int kPrefetchPairs = 64;   // prefetch distance of bf16 weights, in pairs
constexpr int kRegisterQueries = 4;  // queries whose sums stay in registers
constexpr int kValueRegisters = 1;   // `Floats` of sums for each of these queries, in attention to values
constexpr int kW4A8Rows = 4;         // rows of a tile

inline Floats operator+(Floats a, Floats b) {
  return {_mm256_add_ps(a.part[0], b.part[0]), _mm256_add_ps(a.part[1], b.part[1])};
}
inline Floats operator-(Floats a, Floats b) {
  return {_mm256_sub_ps(a.part[0], b.part[0]), _mm256_sub_ps(a.part[1], b.part[1])};
}
inline Floats operator*(Floats a, Floats b) {
  return {_mm256_mul_ps(a.part[0], b.part[0]), _mm256_mul_ps(a.part[1], b.part[1])};
}
inline Floats operator/(Floats a, Floats b) {
  return {_mm256_div_ps(a.part[0], b.part[0]), _mm256_div_ps(a.part[1], b.part[1])};
}

inline Floats broadcast(float number) { return {_mm256_set1_ps(number), _mm256_set1_ps(number)}; }
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }

inline __m256 widened(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Floats load(const bf16* from) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(from);
  return {widened(_mm_loadu_si128(halves)), widened(_mm_loadu_si128(halves + 1))};
}

// Rounds to the nearest bf16, ties to even, in the lower half of each word. A NaN stays a NaN.
inline __m256i rounded(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_srli_epi32(_mm256_castps_si256(_mm256_blendv_ps(
      _mm256_castsi256_ps(up), _mm256_castsi256_ps(quiet), nan)), 16);
}
inline bf16 rounded(float number) {
  return static_cast<bf16>(_mm256_extract_epi16(rounded(_mm256_set1_ps(number)), 0));
}

inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.part[0]);
  _mm256_storeu_ps(to + 8, x.part[1]);
}
inline void store(bf16* to, Floats x) {
  const __m256i mixed = _mm256_packus_epi32(rounded(x.part[0]), rounded(x.part[1]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(mixed, 0xd8));
}
// Stores the first `count` lanes.
template <class Number>
inline void store(Number* to, Floats x, int64_t count) {
  if (count >= kLanes) return store(to, x);
  Number numbers[kLanes];
  store(numbers, x);
  std::memcpy(to, numbers, count * sizeof(Number));
}

// Fused a * b + c and c - a * b: one rounding.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.part[0], b.part[0], c.part[0]),
          _mm256_fmadd_ps(a.part[1], b.part[1], c.part[1])};
}
inline Floats subtract_product(Floats a, Floats b, Floats c) {
  return {_mm256_fnmadd_ps(a.part[0], b.part[0], c.part[0]),
          _mm256_fnmadd_ps(a.part[1], b.part[1], c.part[1])};
}
inline Floats maximum(Floats a, Floats b) {
  return {_mm256_max_ps(a.part[0], b.part[0]), _mm256_max_ps(a.part[1], b.part[1])};
}
inline Floats absolute(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.part[0]), _mm256_andnot_ps(sign, x.part[1])};
}
inline Floats nearest_integer(Floats x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.part[0], kNearest), _mm256_round_ps(x.part[1], kNearest)};
}
// x * 2^power, for integers from -126 to 0.
inline __m256 times_power_of_two(__m256 x, __m256 power) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline Floats times_power_of_two(Floats x, Floats power) {
  return {times_power_of_two(x.part[0], power.part[0]), times_power_of_two(x.part[1], power.part[1])};
}
inline float reduce_sum(Floats x) {
  const __m256 eight = _mm256_add_ps(x.part[0], x.part[1]);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float reduce_max(Floats x) {
  const __m256 eight = _mm256_max_ps(x.part[0], x.part[1]);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

inline Mask first_lanes(int64_t count) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i end = _mm256_set1_epi32(static_cast<int>(count < kLanes ? count : kLanes));
  const __m256i later = _mm256_add_epi32(lanes, _mm256_set1_epi32(8));
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(end, lanes)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(end, later))};
}
inline Mask less(Floats a, Floats b) {
  return {_mm256_cmp_ps(a.part[0], b.part[0], _CMP_LT_OQ),
          _mm256_cmp_ps(a.part[1], b.part[1], _CMP_LT_OQ)};
}
inline bool any_equal(Floats a, Floats b) {
  const __m256 low = _mm256_cmp_ps(a.part[0], b.part[0], _CMP_EQ_OQ);
  return _mm256_movemask_ps(_mm256_or_ps(low, _mm256_cmp_ps(a.part[1], b.part[1], _CMP_EQ_OQ))) != 0;
}
inline bool all(Mask lanes) {
  return (_mm256_movemask_ps(lanes.part[0]) & _mm256_movemask_ps(lanes.part[1])) == 0xff;
}
inline Floats blend(Mask mask, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.part[0], yes.part[0], mask.part[0]),
          _mm256_blendv_ps(no.part[1], yes.part[1], mask.part[1])};
}
inline void masked_store(int32_t* to, Mask mask, int32_t number) {
  const __m256i same = _mm256_set1_epi32(number);
  _mm256_maskstore_epi32(to, _mm256_castps_si256(mask.part[0]), same);
  _mm256_maskstore_epi32(to + 8, _mm256_castps_si256(mask.part[1]), same);
}
// Mask of the nonzero bytes among the first `count`. Does not read further bytes.
inline Mask nonzero(const uint8_t* from, int64_t count) {
  uint8_t bytes[kLanes] = {};
  if (count < kLanes) from = static_cast<const uint8_t*>(std::memcpy(bytes, from, count));
  const __m128i read = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m256i zero = _mm256_setzero_si256();
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_cvtepu8_epi32(read), zero)),
          _mm256_castsi256_ps(
              _mm256_cmpgt_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(read, 8)), zero))};
}
// Stores the lanes of the mask without gaps and returns their number. May overwrite 16 numbers of `to`.
inline int compress(float* to, Mask mask, Floats x) {
  const unsigned kept = _mm256_movemask_ps(mask.part[0]) | _mm256_movemask_ps(mask.part[1]) << 8;
  float numbers[kLanes];
  store(numbers, x);
  int count = 0;
  for (int i = 0; i < kLanes; i++) {
    to[count] = numbers[i];
    count += kept >> i & 1;
  }
  return count;
}

inline Pairs pairs(Words words) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  Pairs both;
  for (int i = 0; i < 2; i++) {
    both.first[i] = _mm256_castsi256_ps(_mm256_slli_epi32(words.part[i], 16));
    both.second[i] = _mm256_castsi256_ps(_mm256_and_si256(words.part[i], high));
  }
  return both;
}

inline Words words(const void* from) {
  const __m256i* both = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(both), _mm256_loadu_si256(both + 1)};
}
inline Words zero_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }

inline void as_inputs(const bf16* from, int64_t count, Input* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; i++) to[i] = widened(from[i]);
}

// sum += a * b, in the register of `sum`. A compiler that picks the form of FMA which overwrites `a` runs out
// of registers.
inline void add_product(__m256 a, __m256 b, __m256& sum) {
  __m256 same = sum;
  asm("vfmadd231ps %2, %1, %0" : "+x"(same) : "x"(a), "x"(b));
  sum = same;
}

// Accumulates the products of one pair of inputs of M rows, `stride` inputs apart, with the weights of V
// panels, `panel_stride` bytes apart.
template <int M, int V>
[[gnu::always_inline]] inline void add_products(const Input* x, int64_t stride, const uint8_t* panels,
                                                int64_t panel_stride, Floats (&sums)[M][V]) {
  unrolled<V>([&](auto v) {
    const auto add = [&](const Input* from, const __m256 (&half)[2]) {
      unrolled<M>([&](auto m) {
        const __m256 number = _mm256_broadcast_ss(from + m * stride);
        Floats& sum = sums[m][v];
        for (int i = 0; i < 2; i++) add_product(number, half[i], sum.part[i]);
      });
    };
    const uint8_t *panel = panels + v * panel_stride, *again = panel;
    // Registers do not suffice for the first and the second numbers of 16 pairs. `asm` hides from the
    // compiler that it loads the same pairs twice; otherwise it would widen both at once.
    asm("" : "+r"(again));
    add(x, pairs(words(panel)).first);
    add(x + 1, pairs(words(again)).second);
  });
}

// Registers of W4A8 products. An output has two lanes, one for each number of a pair, so 16 outputs take
// `kParts` registers.
using Register = __m256;
using Bytes = __m256i;
constexpr int kParts = 4;

inline Register multiply_add(Register a, Register b, Register c) { return _mm256_fmadd_ps(a, b, c); }
inline Register repeated(float number) { return _mm256_set1_ps(number); }
// The first number in even lanes, the second in odd lanes.
inline Register repeated(const float (&both)[2]) {
  double bits;
  std::memcpy(&bits, both, sizeof(bits));
  return _mm256_castpd_ps(_mm256_set1_pd(bits));
}
inline Bytes bytes(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const Bytes*>(from)); }
inline Bytes low_nibbles(Bytes both) { return _mm256_and_si256(both, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes both) { return low_nibbles(_mm256_srli_epi16(both, 4)); }

// The sums over i of dot products of four bytes: in each lane those of codes[i], and of x[i] the first four
// bytes for even lanes, the last four for odd lanes.
inline Register dot_products(const Bytes (&codes)[4], const int8_t (&x)[4][8]) {
  __m256i products = _mm256_setzero_si256();  // int16, enough for eight products of at most 15 * 127
  unrolled<4>([&](auto i) {
    int64_t both;
    std::memcpy(&both, x[i], sizeof(both));
    products = _mm256_add_epi16(products, _mm256_maddubs_epi16(codes[i], _mm256_set1_epi64x(both)));
  });
  return _mm256_cvtepi32_ps(_mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}

// Loads 16 float16 numbers, each into two neighbouring lanes.
inline void load_halves_twice(const uint8_t* halves, Register to[kParts]) {
  for (int i = 0; i < 2; i++) {
    const __m256 eight =
        _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i * kLanes)));
    to[2 * i] = _mm256_permutevar8x32_ps(eight, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
    to[2 * i + 1] = _mm256_permutevar8x32_ps(eight, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7));
  }
}

// The 16 outputs: sums of lanes 2 i and 2 i + 1.
inline Floats add_lane_pairs(const Register (&parts)[kParts]) {
  Floats sums;
  for (int i = 0; i < 2; i++) {
    const __m256d mixed = _mm256_castps_pd(_mm256_hadd_ps(parts[2 * i], parts[2 * i + 1]));
    sums.part[i] = _mm256_castpd_ps(_mm256_permute4x64_pd(mixed, 0xd8));
  }
  return sums;
}

// Rounds to the nearest int8, saturated, and stores these in an order. The result for NaN and infinity is unspecified.
inline void store_int8(int8_t* to, Floats x, const uint8_t (&order_of)[16] = kEvenPairsFirst) {
  const __m256i mixed =
      _mm256_packs_epi32(_mm256_cvtps_epi32(x.part[0]), _mm256_cvtps_epi32(x.part[1]));
  const __m256i words = _mm256_permute4x64_epi64(mixed, 0xd8);
  const __m128i nearest = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  const __m128i order = _mm_load_si128(reinterpret_cast<const __m128i*>(order_of));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(nearest, order));
}

// Transposes 8 rows of 8 words, register `part` of each row: to[i] is column i.
inline void transpose(const Words* rows, int part, __m256i to[8]) {
  __m256i even[8], pairs[8];
  for (int i = 0; i < 8; i += 2) {
    even[i] = _mm256_unpacklo_epi32(rows[i].part[part], rows[i + 1].part[part]);
    even[i + 1] = _mm256_unpackhi_epi32(rows[i].part[part], rows[i + 1].part[part]);
  }
  for (int i = 0; i < 8; i += 4) {
    pairs[i] = _mm256_unpacklo_epi64(even[i], even[i + 2]);
    pairs[i + 1] = _mm256_unpackhi_epi64(even[i], even[i + 2]);
    pairs[i + 2] = _mm256_unpacklo_epi64(even[i + 1], even[i + 3]);
    pairs[i + 3] = _mm256_unpackhi_epi64(even[i + 1], even[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    to[i] = _mm256_permute2x128_si256(pairs[i], pairs[i + 4], 0x20);
    to[i + 4] = _mm256_permute2x128_si256(pairs[i], pairs[i + 4], 0x31);
  }
}
// Transposes 16 rows of 16 words in place.
inline void transpose(Words rows[kLanes]) {
  __m256i columns[2][2][8];
  for (int half = 0; half < 2; half++)
    for (int part = 0; part < 2; part++) transpose(rows + 8 * half, part, columns[part][half]);
  for (int i = 0; i < kLanes; i++)
    for (int half = 0; half < 2; half++) rows[i].part[half] = columns[i / 8][half][i % 8];
}

}  // namespace
