// Products in the tile registers of AMX. One instruction multiplies 16 rows with 16 outputs over 16 pairs.
//
// 32 inputs of a bf16 panel have the layout of a tile of weights, so tiles load them directly. Blocks of 8
// and 4 bits are dequantised `kUnpackedAhead` blocks before they are multiplied, while the tiles work. An
// output is accumulated block by block in one order, for any number of rows and panels. Where reading or
// dequantising weights takes longer than the products, 16 rows take the time of one.
#pragma once

#include "quantized_blocks.h"

namespace {

constexpr int kAmxTileRows = 16;  // rows of a tile register, at most
constexpr int kAmxRowBytes = 64;  // of a row of a tile register, at most
constexpr int kAmxTileWeights = kBlock * kLanes;  // bf16 weights of a tile register
constexpr int kUnpackedAhead = 2;  // blocks between dequantising and multiplying
constexpr int kRing = 4;           // dequantised blocks that are kept, a power of two above `kUnpackedAhead`

// Tiles 0 to 3 hold sums, tiles 4 to 7 factors. The compiler does not know which memory these instructions
// access, so the "memory" clobber makes it finish all writes before them.
template <int T>
inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T>
inline void tile_load(const void* from, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* to, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(T) : "memory");
}
// Adds the product of tile A, (rows, pairs), and tile B, (pairs, columns), to tile `Sums`.
template <int Sums, int A, int B>
inline void tile_add() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B)); }

// Configures the thread's tile registers for a number of rows; its destructor releases them.
class AmxTileConfig {
 public:
  // For rows times weights: tiles 4 and 5 hold rows, tiles 6 and 7 weights.
  explicit AmxTileConfig(int64_t rows) : AmxTileConfig(rows, kAmxRowBytes, 6) {}
  // For weights times rows: tiles 4 to `first_rows` - 1 hold weights, the later ones rows.
  AmxTileConfig(int64_t rows, int first_rows)
      : AmxTileConfig(kAmxTileRows, rows * sizeof(float), first_rows) {}
  ~AmxTileConfig() { asm volatile("tilerelease"); }
  AmxTileConfig(const AmxTileConfig&) = delete;
  AmxTileConfig& operator=(const AmxTileConfig&) = delete;

 private:
  // `rows`: rows of sums and of the left factor A. `bytes`: size of a row of sums and of the right factor B.
  // `first_b`: the first tile that holds B.
  AmxTileConfig(int64_t rows, int64_t bytes, int first_b) {
    alignas(64) uint8_t shape[64] = {1};
    for (int tile = 0; tile < 8; tile++) {
      const bool is_a = tile >= 4 && tile < first_b, is_b = tile >= first_b;
      shape[16 + 2 * tile] = static_cast<uint8_t>(is_a ? kAmxRowBytes : bytes);
      shape[48 + tile] = static_cast<uint8_t>(is_b ? kAmxTileRows : rows);
    }
    asm volatile("ldtilecfg (%0)" ::"r"(shape) : "memory");
  }
};

// Reads the blocks of V bf16 panels, `panel_stride` bytes apart: weights[v] is where block b of panel v is
// stored.
template <int V>
class Bf16Blocks {
 public:
  static constexpr int64_t kBytes = kAmxTileWeights * sizeof(bf16), kAheadBlocks = 2;

  Bf16Blocks(const uint8_t* panels, int64_t panel_stride, const uint8_t* next, int64_t blocks)
      : panels_(panels), panel_stride_(panel_stride), next_(next), blocks_(blocks) {}
  void locate(int64_t b, const bf16* (&weights)[V]) {
    const uint8_t* later = step_address(panels_, next_, b + kAheadBlocks, blocks_, kBytes);
    for (int v = 0; v < V; v++) {
      prefetch(later + v * panel_stride_, kBytes);
      weights[v] = reinterpret_cast<const bf16*>(panels_ + v * panel_stride_ + b * kBytes);
    }
  }

 private:
  const uint8_t* panels_;
  int64_t panel_stride_;
  const uint8_t* next_;
  int64_t blocks_;
};

// Reads the blocks of V panels of fewer bits, in order: weights[v] is block b of panel v, dequantised.
template <class Block, int V>
class UnpackedBlocks {
 public:
  UnpackedBlocks(const uint8_t* panels, int64_t panel_stride, const uint8_t* next, int64_t blocks)
      : panels_(panels), panel_stride_(panel_stride), next_(next), blocks_(blocks) {
    for (int64_t b = 0; b < std::min<int64_t>(kUnpackedAhead, blocks_); b++) unpack(b);
  }
  void locate(int64_t b, const bf16* (&weights)[V]) {
    if (b + kUnpackedAhead < blocks_) unpack(b + kUnpackedAhead);
    for (int v = 0; v < V; v++) weights[v] = ring_[b % kRing][v];
  }

 private:
  void unpack(int64_t b) {
    const uint8_t* later = step_address(panels_, next_, b + kPrefetchBlocks, blocks_, Block::kBytes);
    for (int v = 0; v < V; v++) {
      prefetch(later + v * panel_stride_, Block::kBytes);
      Block::unpack(panels_ + v * panel_stride_ + b * Block::kBytes, ring_[b % kRing][v]);
    }
  }

  const uint8_t* panels_;
  int64_t panel_stride_;
  const uint8_t* next_;
  int64_t blocks_;
  alignas(64) bf16 ring_[kRing][V][kAmxTileWeights];
};

// The class above that reads a format.
template <class Format, int V>
struct BlockReader { using Type = Bf16Blocks<V>; };
template <class Block, int V>
struct BlockReader<BlockWeights<Block>, V> { using Type = UnpackedBlocks<Block, V>; };

// Multiplies R tiles of rows, the second `second_offset` numbers after the first, with V panels.
// Product r * V + v is (rows, 16 outputs).
template <class Format, int R, int V>
void multiply_tiles(const bf16* x, int64_t stride, int64_t second_offset, const uint8_t* panels,
                    int64_t panel_stride, const uint8_t* next, int64_t inputs,
                    float (&sums)[4][kAmxTileRows * kLanes]) {
  static_assert(R <= 2 && R * V <= 4);
  typename BlockReader<Format, V>::Type reader(panels, panel_stride, next, inputs / kBlock);
  unrolled<R * V>([](auto i) { tile_zero<i>(); });
  for (int64_t b = 0; b < inputs / kBlock; b++) {
    const bf16* weights[V];
    reader.locate(b, weights);
    unrolled<R>([&](auto r) { tile_load<4 + r>(x + r * second_offset + b * kBlock, stride * sizeof(bf16)); });
    unrolled<V>([&](auto v) {
      tile_load<6 + v % 2>(weights[v], kAmxRowBytes);
      unrolled<R>([&](auto r) { tile_add<r * V + v, 4 + r, 6 + v % 2>(); });
    });
  }
  unrolled<R * V>([&](auto i) { tile_store<i>(sums[i], kAmxRowBytes); });
}

// Splits rows into `count` tiles of `size` rows. The last tile may overlap the one before.
struct RowTiles {
  int64_t rows, count, size;

  explicit RowTiles(int64_t num)
      : rows(num), count((num + kAmxTileRows - 1) / kAmxTileRows), size((num + count - 1) / count) {}
  int64_t first_row(int64_t tile) const { return std::min(tile * size, rows - size); }
  int64_t first_new_row(int64_t tile) const { return tile * size; }  // the first that no earlier tile has
};

// Panels that are multiplied together: there are four tiles of sums.
inline int64_t amx_panels(int64_t rows) { return rows > kAmxTileRows ? 2 : 4; }

// `multiply_panels` with AMX. An `AmxTileConfig` for `RowTiles(rows).size` rows must be alive.
template <class Format, class Emit>
void multiply_rows(const bf16* x, int64_t rows, int64_t stride, const uint8_t* panels, int count,
                   int64_t panel_stride, const uint8_t* next, int64_t inputs, const Emit& emit) {
  const RowTiles tiles(rows);
  for (int64_t tile = 0; tile < tiles.count; tile += 2) {
    const auto multiply = [&](auto num, auto panels_at_once) {
      constexpr int R = num, V = panels_at_once;
      alignas(64) float sums[4][kAmxTileRows * kLanes];
      const int64_t first = tiles.first_row(tile), second_offset = tiles.first_row(tile + R - 1) - first;
      multiply_tiles<Format, R, V>(x + first * stride, stride, second_offset * stride, panels, panel_stride,
                                   next, inputs, sums);
      for (int r = 0; r < R; r++) {
        const int64_t from = tiles.first_row(tile + r);
        for (int64_t row = tiles.first_new_row(tile + r); row < from + tiles.size; row++)
          for (int v = 0; v < V; v++) emit(row, v, load(sums[r * V + v] + (row - from) * kLanes));
      }
    };
    using std::integral_constant;
    constexpr integral_constant<int, 1> one;
    constexpr integral_constant<int, 2> two;
    if (tile + 1 < tiles.count)
      count == 2 ? multiply(two, two) : multiply(two, one);
    else if (count == 4)
      multiply(one, integral_constant<int, 4>());
    else if (count == 3)
      multiply(one, integral_constant<int, 3>());
    else
      count == 2 ? multiply(one, two) : multiply(one, one);
  }
}

}  // namespace
