// Weights of 8 and 4 bits in blocks, dequantised exactly to the bf16 weights that they came from. Only with
// AVX512-BF16: with AVX2, dequantising takes longer than reading bf16 weights. W4A8 (`w4a8.h`) has the same
// blocks of 4 bits, also with AVX2.
//
// A panel is I / 32 blocks, each of 32 inputs (16 pairs) for 16 outputs.
//
// 4 bits: weight = bf16(scale * code + zero point).
//   16 scales, then 16 zero points (the weight of code 0), float16: one for each output.
//   4 registers of 16 words: pairs 0 to 7 of outputs 0 to 7, then of outputs 8 to 15; pairs 8 to 15 likewise.
//   Lane 2 o + e of a register has the codes of number e of these pairs for its output o: eight nibbles,
//   the first pair's lowest.
//
// 8 bits: weight = bf16(scale * code).
//   16 scales, float16.
//   The codes plus 128, uint8, in the order of a bf16 panel.
#pragma once

#include "weight_layout.h"

namespace {

#ifdef __AMX_BF16__
constexpr int kUnpackedRows = 32;  // with more rows, whole panels are dequantised first
#else
constexpr int kUnpackedRows = 8;
#endif

constexpr int kUnpackPrefetch = 32;  // prefetch distance of a panel that is dequantised, in blocks

// Dequantises a whole block, in the layout of a bf16 panel: (16 pairs, 16, 2).
template <class Block>
struct BlockUnpacker {
  static void unpack(const uint8_t* from, bf16* to) {
    Block block(from);
#pragma GCC unroll 16
    for (int k = 0; k < kBlock / 2; k++)
      _mm512_storeu_si512(to + 2 * k * kLanes, (__m512i)block.pair(k));
  }
};

// A block of 4 bits. `pair` shifts the codes, so it must be called with k = 0, 1, ... 15 in this order.
class FourBits : public BlockUnpacker<FourBits> {
 public:
  static constexpr int kBytes = 4 * kLanes + kBlock * kLanes / 2;

  explicit FourBits(const uint8_t* block) : words_(block + 4 * kLanes) {
    load_halves_twice(block, scale_);
    load_halves_twice(block + 2 * kLanes, zero_);
  }
  __m512bh pair(int k) {
    __m512 weights[2];
    for (int half = 0; half < 2; half++) {
      if (k % 8 == 0) codes_[half] = _mm512_loadu_si512(words_ + (k / 8 * 2 + half) * 64);
      const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      const __m512 code = _mm512_permutexvar_ps(codes_[half], numbers);  // by the lowest four bits
      weights[half] = _mm512_fmadd_ps(code, scale_[half], zero_[half]);
      codes_[half] = _mm512_srli_epi32(codes_[half], 4);
    }
    return _mm512_cvtne2ps_pbh(weights[1], weights[0]);
  }

 private:
  __m512 scale_[2], zero_[2];
  __m512i codes_[2];
  const uint8_t* words_;
};

// A block of 8 bits. A code plus 128 replaces byte 1 of the float 1.0 and makes it 1 + (code + 128) / 2^15.
// One FMA then gives scale * code, without rounding.
class EightBits : public BlockUnpacker<EightBits> {
 public:
  static constexpr int kBytes = 2 * kLanes + kBlock * kLanes;

  explicit EightBits(const uint8_t* block) : codes_(block + 2 * kLanes) {
    __m512 scale[2];
    load_halves_twice(block, scale);
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

// The format of weights in blocks. Sums have the same bits as with the dequantised weights in bf16.
template <class Block>
struct BlockWeights {
  using Input = ::Input;
  static constexpr bool kUnpacks = true;
  static constexpr int kMaxRows = 8;
  static constexpr int max_panels(int rows) { return rows <= 6 ? 2 : 1; }
  static int64_t panels_at_once(int64_t rows) {
    return rows > kUnpackedRows ? Bf16Weights::panels_at_once(rows) : max_panels(static_cast<int>(rows));
  }
  static int64_t panel_bytes(int64_t inputs) { return inputs / kBlock * Block::kBytes; }

  template <int M, int V>
  static void tile(const Input* x, int64_t stride, const uint8_t* panels, int64_t panel_stride,
                   const uint8_t* next, int64_t inputs, Tile& out) {
    const int64_t blocks = inputs / kBlock;
    __m512 sums[M][V];
    for (int m = 0; m < M; m++)
      for (int v = 0; v < V; v++) sums[m][v] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
      const uint8_t* later = step_address(panels, next, b + kPrefetchBlocks, blocks, Block::kBytes);
      for (int v = 0; v < V; v++) prefetch(later + v * panel_stride, Block::kBytes);
      add<M, V>(x + b * kBlock, stride, panels + b * Block::kBytes, panel_stride, sums);
    }
    for (int m = 0; m < M; m++)
      for (int v = 0; v < V; v++) out.sums[m][v] = sums[m][v];
  }

  // Dequantises a panel to bf16, (I / 2, 16, 2).
  static void unpack(const uint8_t* panel, int64_t inputs, bf16* to) {
    for (int64_t b = 0; b < inputs / kBlock; b++) {
      prefetch(panel + (b + kUnpackPrefetch) * Block::kBytes, Block::kBytes);  // reaches into the next panel
      Block::unpack(panel + b * Block::kBytes, to + b * kBlock * kLanes);
    }
  }

 private:
  // Accumulates one block.
  template <int M, int V>
  static void add(const Input* x, int64_t stride, const uint8_t* first, int64_t panel_stride,
                  __m512 (&sums)[M][V]) {
    Block low(first), high(first + (V - 1) * panel_stride);
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
