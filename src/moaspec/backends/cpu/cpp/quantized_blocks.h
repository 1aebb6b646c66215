// Weights in blocks of fewer bits, for CPUs with AVX512-BF16. With AVX2 unpacking them to the very same
// numbers takes longer than reading 16 bits does; `w4a8.h` multiplies what is rounded anyway.
//
// A panel of fewer bits is a row of blocks of 32 inputs. A block of four bits has 16 scales and 16 zeros
// in float16, one of each for an output, then four times 16 words: for pairs 0 to 7 and 8 to 15, of outputs
// 0 to 7 and 8 to 15. A word's lane is an output and a half of the pair; its eight nibbles are the codes of
// eight pairs, the lowest first. A weight is scale * code + zero, rounded to bf16. A block of eight bits has
// 16 scales, then the codes plus 128 in the order of a panel of bf16; a weight is scale * code, rounded.
#pragma once

#include "weight_layout.h"

namespace {

#ifdef __AMX_BF16__
constexpr int kUnpackedRows = 32; // rows above which blocks are unpacked first
#else
constexpr int kUnpackedRows = 16;
#endif

// What each kind of block has: all its pairs, as a panel of 16 bits has them.
template <class Block>
struct Unpacking {
  static void unpack(const uint8_t* from, bf16* to) {
    Block block(from);
#pragma GCC unroll 16
    for (int k = 0; k < kBlock / 2; k++)
      _mm512_storeu_si512(to + 2 * k * kLanes, (__m512i)block.pair(k));
  }
};

// A block of four bits, unpacked pair by pair in their order.
class FourBits : public Unpacking<FourBits> {
 public:
  static constexpr int kBytes = 4 * kLanes + kBlock * kLanes / 2;

  explicit FourBits(const uint8_t* block) : words_(block + 4 * kLanes) {
    spread(block, scale_);
    spread(block + 2 * kLanes, zero_);
  }
  __m512bh pair(int k) {
    __m512 weights[2];
    for (int half = 0; half < 2; half++) {
      if (k % 8 == 0) codes_[half] = _mm512_loadu_si512(words_ + (k / 8 * 2 + half) * 64);
      const __m512i lowest = _mm512_and_si512(codes_[half], _mm512_set1_epi32(15));
      weights[half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(lowest), scale_[half], zero_[half]);
      codes_[half] = _mm512_srli_epi32(codes_[half], 4);
    }
    return _mm512_cvtne2ps_pbh(weights[1], weights[0]);
  }

 private:
  __m512 scale_[2], zero_[2];
  __m512i codes_[2];
  const uint8_t* words_;
};

// Blocks of eight bits. A code becomes the second byte of a float of 1, which is then
// 1 + (code + 128) / 2^15; one instruction takes that to scale * code, without any rounding.
class EightBits : public Unpacking<EightBits> {
 public:
  static constexpr int kBytes = 2 * kLanes + kBlock * kLanes;

  explicit EightBits(const uint8_t* block) : codes_(block + 2 * kLanes) {
    __m512 scale[2];
    spread(block, scale);
    for (int half = 0; half < 2; half++) {
      steps_[half] = scale[half] * _mm512_set1_ps(32768.0f);
      zero_[half] = scale[half] * _mm512_set1_ps(-32768.0f - 128.0f);
    }
  }
  __m512bh pair(int k) {
    const __m512i order = _mm512_setr_epi32(0x0000, 0x0100, 0x0200, 0x0300, 0x0400, 0x0500, 0x0600, 0x0700,
                                            0x0800, 0x0900, 0x0a00, 0x0b00, 0x0c00, 0x0d00, 0x0e00, 0x0f00);
    const __m512i ones = _mm512_castps_si512(_mm512_set1_ps(1.0f));
    __m512 weights[2];
    for (int half = 0; half < 2; half++) {
      const uint8_t* from = codes_ + (2 * k + half) * kLanes;
      const __m512i codes =
          _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      const __m512i floats = _mm512_mask_shuffle_epi8(ones, 0x2222222222222222, codes, order);
      weights[half] = _mm512_fmadd_ps(_mm512_castsi512_ps(floats), steps_[half], zero_[half]);
    }
    return _mm512_cvtne2ps_pbh(weights[1], weights[0]);
  }

 private:
  __m512 steps_[2], zero_[2];
  const uint8_t* codes_;
};

// Weights in blocks of fewer bits. Products have the same bits as with the bf16 weights.
template <class Block>
struct Blocks {
  using Input = ::Input;
  static constexpr bool kUnpacks = true;
  static constexpr int kMostRows = 8;
  static constexpr int most_panels(int rows) { return rows <= 6 ? 2 : 1; }
  static int64_t panels_at_once(int64_t rows) {
    return rows > kUnpackedRows ? Sixteen::panels_at_once(rows) : most_panels(static_cast<int>(rows));
  }
  static int64_t panel_bytes(int64_t inputs) { return inputs / kBlock * Block::kBytes; }

  template <int M, int V>
  static void tile(const Input* x, int64_t stride, const uint8_t* panels, int64_t panel_size,
                   const uint8_t* next, int64_t inputs, Tile& out) {
    const int64_t blocks = inputs / kBlock;
    __m512 sums[M][V];
    for (int m = 0; m < M; m++)
      for (int v = 0; v < V; v++) sums[m][v] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
      const uint8_t* later = step_of(panels, next, b + kBlocksAhead, blocks, Block::kBytes);
      for (int v = 0; v < V; v++) prefetch(later + v * panel_size, Block::kBytes);
      add<M, V>(x + b * kBlock, stride, panels + b * Block::kBytes, panel_size, sums);
    }
    for (int m = 0; m < M; m++)
      for (int v = 0; v < V; v++) out.sums[m][v] = sums[m][v];
  }

  // A panel in 16 bits.
  static void unpack(const uint8_t* panel, int64_t inputs, bf16* to) {
    for (int64_t b = 0; b < inputs / kBlock; b++)
      Block::unpack(panel + b * Block::kBytes, to + b * kBlock * kLanes);
  }

 private:
  template <int M, int V>
  static void add(const Input* x, int64_t stride, const uint8_t* first, int64_t panel_size,
                  __m512 (&sums)[M][V]) {
    Block low(first), high(first + (V - 1) * panel_size);
#pragma GCC unroll 16
    for (int k = 0; k < kBlock / 2; k++) {
      __m512bh weights[2] = {low.pair(k)};
      if (V == 2) weights[1] = high.pair(k);
      for (int m = 0; m < M; m++) {
        const Pair both = pair(x + m * stride + 2 * k);
        for (int v = 0; v < V; v++) sums[m][v] = multiply_add(both, weights[v], sums[m][v]);
      }
    }
  }
};

}  // namespace
