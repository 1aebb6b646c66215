// Codes of GGUF files (`gguf_weights.h`) with AVX512-BF16: a table gives the integers as bf16 numbers.
#pragma once

#include <algorithm>

#include "gguf_blocks.h"

namespace {

constexpr int kGgufPanels = 2;  // panels of a tile
constexpr int kGgufRows = 6;    // rows: 2 * 6 sums, as many products, and codes and tables, fit 32 registers

inline Floats floats_of_halves(const uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Floats floats_of_bytes(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

// The integers of all codes of up to 6 bits as bf16 numbers; those of 4 bits repeat, so that bit 4 of an index does
// not matter.
template <Kind K>
struct Integers {
  alignas(64) bf16 of[64];
  Integers() {
    for (int code = 0; code < 64; code++) {
      const float number = KindTraits<K>::integer(code % (1 << std::min(KindTraits<K>::kBits, 6)));
      uint32_t bits;
      std::memcpy(&bits, &number, sizeof(bits));
      of[code] = bits >> 16;
    }
  }
};
template <Kind K>
const Integers<K> integers;

// Reads the pairs of a group, four at a time, as bf16 numbers.
template <Kind K>
class GroupCodes {
 public:
  GroupCodes() = default;
  explicit GroupCodes(const uint8_t* codes) : codes_(codes) {}

  // Goes on to pairs 4 `quad` to 4 `quad` + 3; quads come in order.
  [[gnu::always_inline]] void start(int quad) {
    quad_ = codes_ + quad * kQuadBytes;
    if constexpr (kBits < 8) low_ = words(quad_);
    if constexpr (kBits == 5) high_ = quad ? _mm512_srli_epi16(high_, 4) : words(codes_ + 4 * 64);
    if constexpr (kBits == 6) high_ = quad % 2 ? _mm512_srli_epi16(high_, 8) : words(codes_ + (4 + quad / 2) * 64);
  }

  // The integers of pair i of these.
  template <int i>
  [[gnu::always_inline]] Pairs pair() const {
    if constexpr (kBits == 8) {
      const __m128i* from = reinterpret_cast<const __m128i*>(quad_ + i * 2 * kLanes);
      const auto floats = [](__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); };
      return _mm512_cvtne2ps_pbh(floats(_mm_loadu_si128(from + 1)), floats(_mm_loadu_si128(from)));
    } else {
      const Words index = _mm512_srli_epi16(low_, 4 * i), table = words(integers<K>.of);
      if constexpr (kBits == 4) return (Pairs)_mm512_permutexvar_epi16(index, table);
      constexpr int kShift = kBits == 5 ? i - 4 : 2 * i - 4;  // of the high bits, to bit 4
      Words high = high_;
      if constexpr (kShift > 0) high = _mm512_srli_epi16(high_, kShift);
      if constexpr (kShift < 0) high = _mm512_slli_epi16(high_, -kShift);
      const Words both = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), index, high, 0xca);
      if constexpr (kBits == 5) return (Pairs)_mm512_permutexvar_epi16(both, table);
      return (Pairs)_mm512_permutex2var_epi16(table, both, words(integers<K>.of + 32));
    }
  }

 private:
  static constexpr int kBits = KindTraits<K>::kBits;
  static constexpr int kQuadBytes = kBits == 8 ? 128 : 64;

  const uint8_t *codes_, *quad_;
  Words low_, high_;
};

// Accumulates the products of pair i of the quad of M rows, `stride` inputs apart, with V panels.
template <int i, Kind K, int M, int V>
[[gnu::always_inline]] inline void add_pair(GroupCodes<K> (&readers)[V], const Input* x, int64_t stride,
                                            Floats (&products)[M][V]) {
  Pairs weights[V];
  for (int v = 0; v < V; v++) weights[v] = readers[v].template pair<i>();
  unrolled<M>([&](auto m) {
    const Pair both = pair(x + m * stride);
    for (int v = 0; v < V; v++) products[m][v] = multiply_add(both, weights[v], products[m][v]);
  });
}

}  // namespace
