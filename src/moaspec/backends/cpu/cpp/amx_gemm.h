// Exact weights of four bits on CPUs with AMX, unpacked output by output and multiplied from the left.
//
// An output has 16 possible weights in a block, which are looked up: one instruction for 32 of them, where
// computing them pair by pair takes nine. A block of 32 inputs has 16 scales and 16 zeros in float16, one of
// each for an output, then four times 32 words: word i of the j-th has the codes of input i for outputs 4 j
// to 4 j + 3, the lowest bits first. Sums have the very bits of `amx_tiles.h`.
#pragma once

#include "amx_tiles.h"

namespace {

struct FourBitOutputs {
  static constexpr int kBytes = 4 * kLanes + kBlock * kLanes / 2;

  // 16 outputs of 32 weights each.
  static void unpack(const uint8_t* block, bf16* to) {
    const Floats codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    alignas(64) float scale[kLanes], zero[kLanes];
    store(scale, from_halves(block));
    store(zero, from_halves(block + 2 * kLanes));
    // Read from memory they cost nothing; a compiler that remembers them takes more instructions.
    asm volatile("" : "+m"(scale), "+m"(zero));
    const Words low = _mm512_set1_epi16(0x0f0f), fifth = _mm512_set1_epi16(0x1010);
    unrolled<4>([&](auto j) {
      const Words all = words(block + 4 * kLanes + j * 2 * kBlock);
      // Each byte has a code; a fifth bit says which of two outputs' weights it stands for.
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

// The format of such weights. What they are multiplied with are rows tile by tile (`RowTiles`), of each tile
// pair by pair that of every row.
struct Outputs {
  using Input = uint32_t;  // a pair
  static constexpr bool kUnpacks = false;
  static int64_t panels_at_once(int64_t rows) {
    return rows <= kRowsPerTile ? 4 : rows <= 2 * kRowsPerTile ? 2 : 1;
  }
  static int64_t panel_bytes(int64_t inputs) { return inputs / kBlock * FourBitOutputs::kBytes; }
  // The first tile that has rows: with several panels 4 and 5 have weights, else 4 alone.
  static int first_rows(int64_t rows) { return panels_at_once(rows) == 1 ? 5 : 6; }
};

// Columns of a tile with `size` rows: small tiles share one transposition of 16 columns.
inline int64_t columns_of(int64_t size) { return size <= 4 ? 4 : size <= 8 ? 8 : kLanes; }

// Rows in that form.
inline void as_pairs(const bf16* x, const RowTiles& tiles, int64_t stride, int64_t inputs, uint32_t* to) {
  const int64_t size = tiles.size, columns = columns_of(size), together = kLanes / columns * kBlock;
  for (int64_t tile = 0; tile < tiles.count; tile++, to += inputs / 2 * size) {
    const bf16* from = x + tiles.first(tile) * stride;
    if (size == 1) {
      __builtin_memcpy(to, from, inputs * sizeof(bf16));
      continue;
    }
    for (int64_t start = 0; start < inputs; start += together) {
      const int64_t blocks = std::min(together, inputs - start) / kBlock;
      Words pairs[kLanes];
      for (int64_t i = 0; i < kLanes; i++) {
        const int64_t block = i / columns, row = i % columns;
        const bool is_there = block < blocks && row < size;
        pairs[i] = is_there ? words(from + row * stride + start + block * kBlock) : no_words();
      }
      transpose(pairs);
      for (int64_t block = 0; block < blocks; block++) {
        const int64_t column = block * columns;  // stored where a row begins that had it first
        uint32_t* const place = to + (start + block * kBlock) / 2 * size - column;
        for (int64_t k = 0; k < kLanes; k++)
          _mm512_mask_storeu_epi32(place + k * size, first(size) << column, pairs[k]);
      }
    }
  }
}

// V panels times R tiles of `size` rows each: sums r * V + v, (16 outputs, `size`), side by side as
// `columns_of` says, 16 numbers an output, or one for a single row.
template <int R, int V>
void multiply_outputs(const uint32_t* x, int64_t size, const uint8_t* panels, int64_t apart,
                      const uint8_t* next, int64_t inputs, float (&sums)[4][kRowsPerTile * kLanes]) {
  static_assert(R * V <= 4 && (V == 1 || R <= 2));
  Unpacked<FourBitOutputs, V> unpacked(panels, apart, next, inputs / kBlock);
  unrolled<R * V>([](auto i) { tile_zero<i>(); });
  for (int64_t b = 0; b < inputs / kBlock; b++) {
    const bf16* weights[V];
    unpacked.find(b, weights);
    const auto load_rows = [&](auto tile, int64_t r) {
      tile_load<tile>(x + (r * inputs / 2 + b * kBlock / 2) * size, size * sizeof(*x));
    };
    if constexpr (R > 2) {  // more than can be kept beside the weights
      tile_load<4>(weights[0], kTileBytes);
      unrolled<R>([&](auto r) {
        constexpr int rows = 5 + r % 3;
        load_rows(std::integral_constant<int, rows>(), r);
        tile_add<r, 4, rows>();
      });
    } else {
      unrolled<R>([&](auto r) { load_rows(std::integral_constant<int, 6 + r>(), r); });
      unrolled<V>([&](auto v) {
        tile_load<4 + v % 2>(weights[v], kTileBytes);
        unrolled<R>([&](auto r) { tile_add<r * V + v, 4 + v % 2, 6 + r>(); });
      });
    }
  }
  if (size == 1) return unrolled<R * V>([&](auto i) { tile_store<i>(sums[i], sizeof(float)); });
  const int64_t columns = columns_of(size);
  unrolled<R * V>([&](auto i) {
    tile_store<i>(sums[i * columns / kLanes] + i * columns % kLanes, kTileBytes);
  });
}

// As `multiply_rows`, of what `as_pairs` gave. There are `Tiles` for them.
template <class Give>
void multiply_by_outputs(const uint32_t* x, int64_t rows, const uint8_t* panels, int count, int64_t apart,
                         const uint8_t* next, int64_t inputs, const Give& give) {
  const RowTiles tiles(rows);
  const auto multiply = [&](int64_t tile, auto num, auto panels_at_once) {
    constexpr int R = num, V = panels_at_once;
    alignas(64) float sums[4][kRowsPerTile * kLanes];
    multiply_outputs<R, V>(x + tile * inputs / 2 * tiles.size, tiles.size, panels, apart, next, inputs, sums);
    if constexpr (R == 1)
      if (tiles.size == 1) return unrolled<V>([&](auto v) { give(tile, v, load(sums[v])); });
    Words columns[kLanes];
    for (int i = 0; i < R * V; i++) {
      const int64_t column = i * columns_of(tiles.size), from = tiles.first(tile + i / V);
      if (column % kLanes == 0) {
        for (int o = 0; o < kLanes; o++) columns[o] = words(sums[column / kLanes] + o * kLanes);
        transpose(columns);
      }
      for (int64_t row = tiles.fresh(tile + i / V); row < from + tiles.size; row++)
        give(row, i % V, (Floats)columns[column % kLanes + row - from]);
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
