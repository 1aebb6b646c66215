// Products by the tile registers of CPUs with AMX: 16 rows by 16 outputs at a time, 16 pairs deep.
//
// A panel's block of 32 inputs has the layout of a tile of weights, so it is loaded directly. A block of
// eight or four bits (`amx_gemm.h`) is unpacked a few blocks ahead, while the tiles multiply. An output is
// summed block by block in one order, for any rows and panels. If reading or unpacking weights takes longer
// than the products, 16 rows take the time of one.
#pragma once

#include "quantized_blocks.h"

namespace {

constexpr int kRowsPerTile = 16;    // rows of a tile, at most
constexpr int kTileBytes = 64;     // of a row of a tile, at most
constexpr int kTileNumbers = kBlock * kLanes;  // weights of a tile
constexpr int kUnpackedAhead = 2;  // blocks between unpacking and multiplying
constexpr int kRing = 4;           // unpacked blocks that are kept, a power of two above `kUnpackedAhead`

// Tiles 0 to 3 are sums, 4 to 7 are factors. The compiler does not see the memory that these instructions
// access; "memory" makes it finish all writes before them.
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
// Adds the products of A's rows with B's pairs of rows.
template <int Sums, int A, int B>
inline void tile_add() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B)); }

// While it lives, this thread's tiles are for products of some rows of inputs.
class Tiles {
 public:
  // Rows times weights: tiles 4 and 5 have rows, 6 and 7 weights.
  explicit Tiles(int64_t rows) : Tiles(rows, kTileBytes, 6) {}
  // Weights times rows: tiles from 4 on have weights, those from `first_rows` on rows.
  Tiles(int64_t rows, int first_rows) : Tiles(kRowsPerTile, rows * sizeof(float), first_rows) {}
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  // Rows of sums and of A, bytes of a row of sums and of B, and B's first tile.
  Tiles(int64_t rows, int64_t bytes, int first_b) {
    alignas(64) uint8_t shape[64] = {1};
    for (int tile = 0; tile < 8; tile++) {
      const bool is_a = tile >= 4 && tile < first_b, is_b = tile >= first_b;
      shape[16 + 2 * tile] = static_cast<uint8_t>(is_a ? kTileBytes : bytes);
      shape[48 + tile] = static_cast<uint8_t>(is_b ? kRowsPerTile : rows);
    }
    asm volatile("ldtilecfg (%0)" ::"r"(shape) : "memory");
  }
};

// Where a block's weights are: in the V panels themselves, which are `apart` bytes apart.
template <int V>
class Panels {
 public:
  static constexpr int64_t kBytes = kTileNumbers * sizeof(bf16), kBefore = 2;

  Panels(const uint8_t* panels, int64_t apart, const uint8_t* next, int64_t blocks)
      : panels_(panels), apart_(apart), next_(next), blocks_(blocks) {}
  void find(int64_t b, const bf16* (&weights)[V]) {
    const uint8_t* later = step_of(panels_, next_, b + kBefore, blocks_, kBytes);
    for (int v = 0; v < V; v++) {
      prefetch(later + v * apart_, kBytes);
      weights[v] = reinterpret_cast<const bf16*>(panels_ + v * apart_ + b * kBytes);
    }
  }

 private:
  const uint8_t* panels_;
  int64_t apart_;
  const uint8_t* next_;
  int64_t blocks_;
};

// Unpacked from fewer bits, a few blocks ahead: `Block::kBytes` of a panel by `Block::unpack`.
template <class Block, int V>
class Unpacked {
 public:
  Unpacked(const uint8_t* panels, int64_t apart, const uint8_t* next, int64_t blocks)
      : panels_(panels), apart_(apart), next_(next), blocks_(blocks) {
    for (int64_t b = 0; b < std::min<int64_t>(kUnpackedAhead, blocks_); b++) unpack(b);
  }
  void find(int64_t b, const bf16* (&weights)[V]) {
    if (b + kUnpackedAhead < blocks_) unpack(b + kUnpackedAhead);
    for (int v = 0; v < V; v++) weights[v] = ring_[b % kRing][v];
  }

 private:
  void unpack(int64_t b) {
    const uint8_t* later = step_of(panels_, next_, b + kBlocksAhead, blocks_, Block::kBytes);
    for (int v = 0; v < V; v++) {
      prefetch(later + v * apart_, Block::kBytes);
      Block::unpack(panels_ + v * apart_ + b * Block::kBytes, ring_[b % kRing][v]);
    }
  }

  const uint8_t* panels_;
  int64_t apart_;
  const uint8_t* next_;
  int64_t blocks_;
  alignas(64) bf16 ring_[kRing][V][kTileNumbers];
};

// Which of these a format has.
template <class Format, int V>
struct WeightsOf { using Type = Panels<V>; };
template <class Block, int V>
struct WeightsOf<Blocks<Block>, V> { using Type = Unpacked<Block, V>; };

// R tiles of rows, the second `second` numbers behind the first, times V panels: sums r * V + v.
template <class Format, int R, int V>
void multiply_tiles(const bf16* x, int64_t stride, int64_t second, const uint8_t* panels, int64_t apart,
                    const uint8_t* next, int64_t inputs, float (&sums)[4][kRowsPerTile * kLanes]) {
  static_assert(R <= 2 && R * V <= 4);
  typename WeightsOf<Format, V>::Type panels_read(panels, apart, next, inputs / kBlock);
  unrolled<R * V>([](auto i) { tile_zero<i>(); });
  for (int64_t b = 0; b < inputs / kBlock; b++) {
    const bf16* weights[V];
    panels_read.find(b, weights);
    unrolled<R>([&](auto r) { tile_load<4 + r>(x + r * second + b * kBlock, stride * sizeof(bf16)); });
    unrolled<V>([&](auto v) {
      tile_load<6 + v % 2>(weights[v], kTileBytes);
      unrolled<R>([&](auto r) { tile_add<r * V + v, 4 + r, 6 + v % 2>(); });
    });
  }
  unrolled<R * V>([&](auto i) { tile_store<i>(sums[i], kTileBytes); });
}

// How rows are parted among tiles: into nearly equal parts. The last part may overlap the one before.
struct RowTiles {
  int64_t rows, count, size;

  explicit RowTiles(int64_t num)
      : rows(num), count((num + kRowsPerTile - 1) / kRowsPerTile), size((num + count - 1) / count) {}
  int64_t first(int64_t tile) const { return std::min(tile * size, rows - size); }
  int64_t fresh(int64_t tile) const { return tile * size; }  // the first that no tile before it has
};

inline int64_t tiled_panels(int64_t rows) { return rows > kRowsPerTile ? 2 : 4; }

// Rows times `count` panels, `apart` bytes apart: `give(row, v, sums)`. There are `Tiles` for them.
template <class Format, class Give>
void multiply_rows(const bf16* x, int64_t rows, int64_t stride, const uint8_t* panels, int count,
                   int64_t apart, const uint8_t* next, int64_t inputs, const Give& give) {
  const RowTiles tiles(rows);
  for (int64_t tile = 0; tile < tiles.count; tile += 2) {
    const auto multiply = [&](auto num, auto panels_at_once) {
      constexpr int R = num, V = panels_at_once;
      alignas(64) float sums[4][kRowsPerTile * kLanes];
      const int64_t first = tiles.first(tile), second = tiles.first(tile + R - 1) - first;
      multiply_tiles<Format, R, V>(x + first * stride, stride, second * stride, panels, apart, next, inputs,
                                   sums);
      for (int r = 0; r < R; r++) {
        const int64_t from = tiles.first(tile + r);
        for (int64_t row = tiles.fresh(tile + r); row < from + tiles.size; row++)
          for (int v = 0; v < V; v++) give(row, v, load(sums[r * V + v] + (row - from) * kLanes));
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
