// Weights of 4 bits with AMX, dequantised exactly, output by output, and used as the left factor.
//
// Within a block, an output has only 16 different weights, so a table of them is looked up: one instruction
// for 32 weights, where computing these pair by pair takes nine. Sums have the same bits as those of
// `amx_tiles.h`.
//
// A block of 32 inputs for 16 outputs:
//   16 scales, then 16 zero points, float16: one for each output.
//   4 registers of 32 words of 16 bits. Word i of register j has the codes of input i for outputs 4 j to
//   4 j + 3, the first in the lowest bits.
#pragma once

#include "amx_tiles.h"

namespace {

struct FourBitsByOutput {
  static constexpr int kBytes = 4 * kLanes + kBlock * kLanes / 2;

  // Dequantises a block to (16 outputs, 32 inputs).
  static void unpack(const uint8_t* block, bf16* to) {
    const Floats codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    alignas(64) float scale[kLanes], zero[kLanes];
    store(scale, from_halves(block));
    store(zero, from_halves(block + 2 * kLanes));
    // A broadcast from memory costs nothing. `asm` makes the compiler read these from memory; keeping them in
    // registers takes more instructions.
    asm volatile("" : "+m"(scale), "+m"(zero));
    const Words low = _mm512_set1_epi16(0x0f0f), fifth = _mm512_set1_epi16(0x1010);
    unrolled<4>([&](auto j) {
      const Words all = words(block + 4 * kLanes + j * 2 * kBlock);
      // Each byte is a code, an index into the weights of an even output. In `odd`, bit 4 is set: an index
      // into those of the output after it.
      const Words even = _mm512_and_si512(all, low);
      const Words odd = _mm512_ternarylogic_epi32(_mm512_srli_epi16(all, 4), low, fifth, 0xea);
      unrolled<2>([&](auto pair) {
        constexpr int o = 4 * j + 2 * pair;
        const Words both = (Words)_mm512_cvtne2ps_pbh(
            multiply_add(codes, repeated(scale[o + 1]), repeated(zero[o + 1])),
            multiply_add(codes, repeated(scale[o]), repeated(zero[o])));
        const auto look_up = [&](Words bytes, int output) {
          const Words found = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 8 * pair), both);
          _mm512_store_si512(to + output * kBlock, found);
        };
        look_up(even, o);
        look_up(odd, o + 1);
      });
    });
  }

 private:
  static Floats from_halves(const uint8_t* halves) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
  }
};

// The format of these weights. Its inputs are rows in the layout of `as_pairs`.
struct WeightsByOutput {
  using Input = uint32_t;  // a pair of bf16
  static constexpr bool kUnpacks = false;
  static int64_t panels_at_once(int64_t rows) {
    return rows <= kAmxTileRows ? 4 : rows <= 2 * kAmxTileRows ? 2 : 1;
  }
  static int64_t panel_bytes(int64_t inputs) { return inputs / kBlock * FourBitsByOutput::kBytes; }
  // The first tile register that holds rows. Several panels need tiles 4 and 5 for weights, one panel only
  // tile 4.
  static int first_rows(int64_t rows) { return panels_at_once(rows) == 1 ? 5 : 6; }
};

// Columns for a tile of `size` rows in a transposition of 16 by 16 words: small tiles share one.
inline int64_t columns_of(int64_t size) { return size <= 4 ? 4 : size <= 8 ? 8 : kLanes; }

// Writes rows as right factors: for each tile of `RowTiles`, (inputs / 2, `size`) pairs. Rows of x are
// `stride` numbers apart.
inline void as_pairs(const bf16* x, const RowTiles& tiles, int64_t stride, int64_t inputs, uint32_t* to) {
  const int64_t size = tiles.size, columns = columns_of(size), step = kLanes / columns * kBlock;
  for (int64_t tile = 0; tile < tiles.count; tile++, to += inputs / 2 * size) {
    const bf16* from = x + tiles.first_row(tile) * stride;
    if (size == 1) {
      __builtin_memcpy(to, from, inputs * sizeof(bf16));
      continue;
    }
    for (int64_t start = 0; start < inputs; start += step) {
      const int64_t blocks = std::min(step, inputs - start) / kBlock;
      Words pairs[kLanes];
      for (int64_t i = 0; i < kLanes; i++) {
        const int64_t block = i / columns, row = i % columns;
        const bool is_there = block < blocks && row < size;
        pairs[i] = is_there ? words(from + row * stride + start + block * kBlock) : zero_words();
      }
      transpose(pairs);
      for (int64_t block = 0; block < blocks; block++) {
        const int64_t column = block * columns;  // its first; stores begin `column` words early
        uint32_t* const place = to + (start + block * kBlock) / 2 * size - column;
        for (int64_t k = 0; k < kLanes; k++)
          _mm512_mask_storeu_epi32(place + k * size, first_lanes(size) << column, pairs[k]);
      }
    }
  }
}

// Multiplies V panels with R tiles of `size` rows. Product r * V + v is (16 outputs, `size` rows). `sums` has
// rows of 16 numbers; each product takes `columns_of(size)` columns, and products stand side by side. With
// one row, product i is the 16 numbers sums[i].
template <int R, int V>
void multiply_outputs(const uint32_t* x, int64_t size, const uint8_t* panels, int64_t panel_stride,
                      const uint8_t* next, int64_t inputs, float (&sums)[4][kAmxTileRows * kLanes]) {
  static_assert(R * V <= 4 && (V == 1 || R <= 2));
  UnpackedBlocks<FourBitsByOutput, V> reader(panels, panel_stride, next, inputs / kBlock);
  unrolled<R * V>([](auto i) { tile_zero<i>(); });
  for (int64_t b = 0; b < inputs / kBlock; b++) {
    const bf16* weights[V];
    reader.locate(b, weights);
    const auto load_rows = [&](auto tile, int64_t r) {
      tile_load<tile>(x + (r * inputs / 2 + b * kBlock / 2) * size, size * sizeof(*x));
    };
    if constexpr (R > 2) {  // tiles of rows, more than there are registers: they take turns
      tile_load<4>(weights[0], kAmxRowBytes);
      unrolled<R>([&](auto r) {
        constexpr int rows = 5 + r % 3;
        load_rows(std::integral_constant<int, rows>(), r);
        tile_add<r, 4, rows>();
      });
    } else {
      unrolled<R>([&](auto r) { load_rows(std::integral_constant<int, 6 + r>(), r); });
      unrolled<V>([&](auto v) {
        tile_load<4 + v % 2>(weights[v], kAmxRowBytes);
        unrolled<R>([&](auto r) { tile_add<r * V + v, 4 + v % 2, 6 + r>(); });
      });
    }
  }
  if (size == 1) return unrolled<R * V>([&](auto i) { tile_store<i>(sums[i], sizeof(float)); });
  const int64_t columns = columns_of(size);
  unrolled<R * V>([&](auto i) {
    tile_store<i>(sums[i * columns / kLanes] + i * columns % kLanes, kAmxRowBytes);
  });
}

// `multiply_rows` for weights as the left factor; x is what `as_pairs` wrote. An `AmxTileConfig` must be
// alive.
template <class Emit>
void multiply_by_outputs(const uint32_t* x, int64_t rows, const uint8_t* panels, int count,
                         int64_t panel_stride, const uint8_t* next, int64_t inputs, const Emit& emit) {
  const RowTiles tiles(rows);
  const auto multiply = [&](int64_t tile, auto num, auto panels_at_once) {
    constexpr int R = num, V = panels_at_once;
    alignas(64) float sums[4][kAmxTileRows * kLanes];
    multiply_outputs<R, V>(x + tile * inputs / 2 * tiles.size, tiles.size, panels, panel_stride, next, inputs,
                           sums);
    if constexpr (R == 1)
      if (tiles.size == 1) return unrolled<V>([&](auto v) { emit(tile, v, load(sums[v])); });
    Words columns[kLanes];
    for (int i = 0; i < R * V; i++) {
      const int64_t column = i * columns_of(tiles.size), from = tiles.first_row(tile + i / V);
      if (column % kLanes == 0) {
        for (int o = 0; o < kLanes; o++) columns[o] = words(sums[column / kLanes] + o * kLanes);
        transpose(columns);
      }
      for (int64_t row = tiles.first_new_row(tile + i / V); row < from + tiles.size; row++)
        emit(row, i % V, (Floats)columns[column % kLanes + row - from]);
    }
  };
  using std::integral_constant;
  constexpr integral_constant<int, 1> one;
  constexpr integral_constant<int, 2> two;
  constexpr integral_constant<int, 3> three;
  constexpr integral_constant<int, 4> four;
  if (tiles.count == 1)
    return count == 4 ? multiply(0, one, four) : count == 3 ? multiply(0, one, three)
         : count == 2 ? multiply(0, one, two) : multiply(0, one, one);
  if (tiles.count == 2) return count == 2 ? multiply(0, two, two) : multiply(0, two, one);
  for (int64_t tile = 0; tile < tiles.count; tile += 4) switch (tiles.count - tile) {
      case 1: multiply(tile, one, one); break;
      case 2: multiply(tile, two, one); break;
      case 3: multiply(tile, three, one); break;
      default: multiply(tile, four, one);
    }
}

}  // namespace
