// Codes of GGUF files (`gguf_weights.h`) with AVX2: integers become float32 numbers.
#pragma once

#include "gguf_blocks.h"

namespace {

constexpr int kGgufPanels = 1;  // panels of a tile
constexpr int kGgufRows = 3;    // rows of a tile; more rows unpack a group once, see `multiply_unpacked`

inline Floats floats_of_halves(const uint8_t* from) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline __m256 floats_of_eight(const uint8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline Floats floats_of_bytes(const uint8_t* from) { return {floats_of_eight(from), floats_of_eight(from + 8)}; }

// Moves bits `at` to `at` + `count` - 1 of each word to bit `to`; other bits become 0.
template <int at, int count, int to>
[[gnu::always_inline]] inline __m256i bits_of(__m256i words) {
  __m256i moved = words;
  if constexpr (at > to) moved = _mm256_srli_epi32(words, at - to);
  if constexpr (at < to) moved = _mm256_slli_epi32(words, to - at);
  return _mm256_and_si256(moved, _mm256_set1_epi32(((1 << count) - 1) << to));
}

// Reads the numbers of a group, those of four pairs at a time.
template <Kind K>
class GroupCodes {
 public:
  using T = KindTraits<K>;

  GroupCodes() = default;
  explicit GroupCodes(const uint8_t* codes) : codes_(codes) {}

  // Goes on to pairs 4 `quad` to 4 `quad` + 3.
  [[gnu::always_inline]] void start(int quad) {
    quad_ = codes_ + quad * (T::kBits == 8 ? 128 : 64);
    // Where the high bits of these pairs are: first in their words, after a shift.
    if constexpr (T::kBits == 5) {
      high_ = codes_ + 4 * 64;
      shift_ = _mm_cvtsi32_si128(4 * quad);
    }
    if constexpr (T::kBits == 6) {
      high_ = codes_ + (4 + quad / 2) * 64;
      shift_ = _mm_cvtsi32_si128(8 * (quad % 2));
    }
  }

  // The integers of number `e` of pair i of these, of outputs 8 `half` to 8 `half` + 7.
  template <int i, int e, int half>
  [[gnu::always_inline]] __m256 integers() const {
    if constexpr (T::kBits == 8) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(quad_ + (2 * i + half) * kLanes));
      const __m256i both = _mm256_cvtepi8_epi16(bytes);  // of each output
      return _mm256_cvtepi32_ps(_mm256_srai_epi32(e ? both : _mm256_slli_epi32(both, 16), 16));
    } else {
      __m256i code = bits_of<16 * e + 4 * i, 4, 0>(read<half>(quad_));
      if constexpr (T::kBits > 4) {
        constexpr int kHigh = T::kBits - 4;
        const __m256i high = _mm256_srl_epi32(read<half>(high_), shift_);
        code = _mm256_or_si256(code, bits_of<16 * e + kHigh * i, kHigh, 4>(high));
      }
      if constexpr (T::kIsTable) return look_up(code);
      if constexpr (T::kLowest != 0) code = _mm256_add_epi32(code, _mm256_set1_epi32(T::kLowest));
      return _mm256_cvtepi32_ps(code);
    }
  }

 private:
  template <int half>
  [[gnu::always_inline]] static __m256i read(const uint8_t* words) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + half * 32));
  }
  static __m256 look_up(__m256i code) {
    constexpr const int* t = kIQ4;
    const __m256 low = _mm256_setr_ps(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]);
    const __m256 high = _mm256_setr_ps(t[8], t[9], t[10], t[11], t[12], t[13], t[14], t[15]);
    const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));  // bit 3, as the sign
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code), _mm256_permutevar8x32_ps(high, code), is_high);
  }

  const uint8_t *codes_, *quad_, *high_;
  __m128i shift_;
};

// Accumulates the products of pair i of the quad of M rows, `stride` inputs apart, with a panel: first numbers first.
template <int i, Kind K, int M, int V>
[[gnu::always_inline]] inline void add_pair(GroupCodes<K> (&readers)[V], const Input* x, int64_t stride,
                                            Floats (&products)[M][V]) {
  static_assert(V == 1);
  unrolled<2>([&](auto e) {
    const __m256 weights[2] = {readers[0].template integers<i, e, 0>(), readers[0].template integers<i, e, 1>()};
    unrolled<M>([&](auto m) {
      const __m256 number = _mm256_broadcast_ss(x + m * stride + e);
      for (int half = 0; half < 2; half++) add_product(number, weights[half], products[m][0].part[half]);
    });
  });
}

}  // namespace
