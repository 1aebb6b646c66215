// Weights in four bits times inputs in eight, for CPUs with AVX2 and for what may be rounded: drafts.
//
// Panels are laid out as `blocks.h` says. Inputs are rounded to 127 steps of the largest of each 32, so
// that 32 products take one instruction; a block's sum is its scale times these products, plus its zero
// times the sum of the inputs. A draft step reads a third of the bytes of 16 bits.
#pragma once

#include <cstring>

#include "panels.h"

namespace {

constexpr int kQuarters = 4;         // of a panel's outputs; both halves of their pairs fill a register
constexpr float kSmallest = 1e-30f;  // of what is told from zero: steps of less are not finite

// 32 inputs. Halves of a pair are lanes of their own until the end of a product.
struct RoundedInputs {
  int8_t codes[4][8];  // of a group of 8 pairs, the even ones and the odd ones, by half of the pair
  float scale;
  float sums[2];  // of the inputs themselves, by half of the pair
};

inline void as_inputs(const bf16* from, int64_t count, RoundedInputs* to) {
  for (int64_t b = 0; b < count / kBlock; b++) {
    float numbers[kBlock];
    store(numbers, load(from + b * kBlock));
    store(numbers + kLanes, load(from + b * kBlock + kLanes));
    const float most = highest(larger(magnitude(load(numbers)), magnitude(load(numbers + kLanes))));
    RoundedInputs& block = to[b];
    block.scale = most / 127;
    block.sums[0] = block.sums[1] = 0;
    for (int i = 0; i < kBlock; i++) block.sums[i % 2] += numbers[i];
    const Floats steps = all(most > kSmallest ? 127 / most : 0.0f);
    int32_t codes[kBlock];
    for (int half = 0; half < 2; half++) {
      const Floats scaled = load(numbers + half * kLanes) * steps;
      for (int part = 0; part < 2; part++)  // of what is not finite, too: some number
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + half * kLanes + part * 8),
                            _mm256_cvtps_epi32(scaled.part[part]));
    }
    for (int i = 0; i < kBlock; i++)
      block.codes[i / 16 * 2 + i / 2 % 2][i % 2 * 4 + i % 16 / 4] = static_cast<int8_t>(codes[i]);
  }
}

struct Nibbles {
  using Input = RoundedInputs;
  static constexpr int kInputs = kBlock;
  static constexpr int kMostRows = 4;
  static constexpr int kBytes = 4 * kLanes + kBlock * kLanes / 2;
  static constexpr int most_panels(int) { return 1; }
  static int64_t panels_at_once(int64_t) { return 1; }
  static int64_t panel_bytes(int64_t inputs) { return inputs / kBlock * kBytes; }

  // M rows times one panel.
  template <int M, int V>
  static void tile(const Input* x, int64_t stride, const uint8_t* panel, int64_t,
                   const uint8_t* next, int64_t inputs, Tile& out) {
    static_assert(V == 1);
    const int64_t blocks = inputs / kBlock;
    __m256 sums[M][kQuarters];
    for (auto& row : sums)
      for (auto& sum : row) sum = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
      const uint8_t* later = b + kBlocksAhead < blocks ? panel + (b + kBlocksAhead) * kBytes
                                                       : next + (b + kBlocksAhead - blocks) * kBytes;
      for (int line = 0; line < kBytes; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(later + line), _MM_HINT_T0);
      add<M>(x + b, stride, panel + b * kBytes, sums);
    }
    for (int m = 0; m < M; m++)
      for (int half = 0; half < 2; half++) {
        const __m256 both = _mm256_hadd_ps(sums[m][2 * half], sums[m][2 * half + 1]);
        out.sums[m][0].part[half] =
            _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(both), 0xd8));
      }
  }

 private:
  // One number for each of 8 outputs, twice, as the lanes of two quarters want it.
  static void spread(const uint8_t* halves, __m256 to[2]) {
    const __m256i low = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    const __m256i high = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
    const __m256 eight =
        _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
    to[0] = _mm256_permutevar8x32_ps(eight, low);
    to[1] = _mm256_permutevar8x32_ps(eight, high);
  }

  // Both halves of a pair in turns, all over a register.
  template <class Number>
  static __m256i repeated(const Number (&both)[sizeof(int64_t) / sizeof(Number)]) {
    int64_t bits;
    std::memcpy(&bits, both, sizeof(bits));
    return _mm256_set1_epi64x(bits);
  }

  template <int M>
  [[gnu::always_inline]] static void add(const Input* x, int64_t stride, const uint8_t* block,
                                         __m256 (&sums)[M][kQuarters]) {
    const __m256i lowest = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const uint8_t* words = block + 4 * kLanes;
    __m256 scale[kQuarters], zero[kQuarters];
    for (int half = 0; half < 2; half++) {
      spread(block + half * kLanes, scale + 2 * half);
      spread(block + (2 + half) * kLanes, zero + 2 * half);
    }
    unrolled<kQuarters>([&](auto q) {
      __m256i codes[4];
      unrolled<2>([&](auto group) {
        const __m256i both = _mm256_loadu_si256(
            reinterpret_cast<const __m256i*>(words + group * 128 + q * sizeof(__m256i)));
        codes[2 * group] = _mm256_and_si256(both, lowest);
        codes[2 * group + 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), lowest);
      });
      unrolled<M>([&](auto m) {
        const Input& row = x[m * stride];
        __m256i products = _mm256_setzero_si256();  // of 15 * 127 at most; eight of them fit
        unrolled<4>([&](auto part) {
          products = _mm256_add_epi16(
              products, _mm256_maddubs_epi16(codes[part], repeated(row.codes[part])));
        });
        const __m256 whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(products, ones));
        const __m256 share = _mm256_mul_ps(scale[q], _mm256_broadcast_ss(&row.scale));
        sums[m][q] = _mm256_fmadd_ps(share, whole, sums[m][q]);
        sums[m][q] =
            _mm256_fmadd_ps(zero[q], _mm256_castsi256_ps(repeated(row.sums)), sums[m][q]);
      });
    });
  }
};

}  // namespace
