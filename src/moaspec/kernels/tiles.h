// Products by the tile registers of CPUs with AMX: 16 rows by 16 outputs at a time, 16 pairs deep.
//
// A panel's block of 32 inputs lies in memory as a tile of weights does, so it is loaded as it is; one of
// fewer bits is unpacked a few blocks ahead, beside the tiles' own work. An output is summed block by
// block in one order, whatever rows and panels are multiplied together. So up to 16 rows take the time of
// one, where reading or unpacking weights takes longer than that.
#pragma once

#include "blocks.h"

namespace {

constexpr int kTileMost = 16;      // rows of a tile
constexpr int kTileBytes = 64;     // of a row of a tile
constexpr int kTileNumbers = kBlock * kLanes;  // weights of a tile
constexpr int kUnpackedAhead = 2;  // blocks between unpacking and multiplying
constexpr int kRing = 4;           // unpacked blocks that are kept, a power of two above `kUnpackedAhead`

// While it lives, this thread's tiles have so many rows of inputs: sums are 0 to 3, inputs 4 and 5, weights
// 6 and 7.
class Tiles {
 public:
  explicit Tiles(int rows) {
    alignas(64) uint8_t shape[64] = {1};
    for (int tile = 0; tile < 8; tile++) {
      shape[16 + 2 * tile] = kTileBytes;
      shape[48 + tile] = static_cast<uint8_t>(tile < 6 ? rows : kTileMost);
    }
    known(shape);
    _tile_loadconfig(shape);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Compilers do not know what the instructions for tiles read and write: all that is at a place is in memory.
  static void known(const void* place) { asm volatile("" ::"r"(place) : "memory"); }
};

// Adds a block's products with V panels, of R times the rows of a tile, of which the second ones are so many
// numbers behind the first ones.
template <int R, int V>
[[gnu::always_inline]] inline void add_tiles(const bf16* x, int64_t second, int64_t row_bytes,
                                             const bf16* const (&weights)[V]) {
  static_assert(R * V <= 4);
  _tile_loadd(4, x, row_bytes);
  if constexpr (R == 2) _tile_loadd(5, x + second, row_bytes);
  _tile_loadd(6, weights[0], kTileBytes);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (R == 2) _tile_dpbf16ps(2, 5, 6);
  if constexpr (V > 1) {
    _tile_loadd(7, weights[1], kTileBytes);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (R == 2) _tile_dpbf16ps(3, 5, 7);
  }
  if constexpr (V > 2) {
    _tile_loadd(6, weights[2], kTileBytes);
    _tile_dpbf16ps(2, 4, 6);
  }
  if constexpr (V > 3) {
    _tile_loadd(7, weights[3], kTileBytes);
    _tile_dpbf16ps(3, 4, 7);
  }
}

// Where tiles of weights are: in the panels themselves.
template <int V>
class Panels {
 public:
  Panels(const uint8_t* panels, int64_t apart, const uint8_t* next, int64_t blocks)
      : panels_(panels), apart_(apart), next_(next), blocks_(blocks) {}
  void find(int64_t b, const bf16* (&weights)[V]) {
    constexpr int64_t kBytes = kTileNumbers * sizeof(bf16), kBlocksBefore = 2;
    const uint8_t* later = b + kBlocksBefore < blocks_ ? panels_ + (b + kBlocksBefore) * kBytes
                                                       : next_ + (b + kBlocksBefore - blocks_) * kBytes;
    for (int v = 0; v < V; v++) {
      for (int line = 0; line < kBytes; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(later + v * apart_ + line), _MM_HINT_T0);
      weights[v] = reinterpret_cast<const bf16*>(panels_ + v * apart_ + b * kBytes);
    }
  }

 private:
  const uint8_t* panels_;
  int64_t apart_;
  const uint8_t* next_;
  int64_t blocks_;
};

// Unpacked from fewer bits, a few blocks ahead.
template <class Block, int V>
class Unpacked {
 public:
  Unpacked(const uint8_t* panels, int64_t apart, const uint8_t* next, int64_t blocks)
      : panels_(panels), apart_(apart), next_(next), blocks_(blocks) {
    for (int64_t b = 0; b < std::min<int64_t>(kUnpackedAhead, blocks_); b++) unpack(b);
  }
  void find(int64_t b, const bf16* (&weights)[V]) {
    if (b + kUnpackedAhead < blocks_) unpack(b + kUnpackedAhead);
    Tiles::known(ring_);
    for (int v = 0; v < V; v++) weights[v] = ring_[b % kRing][v];
  }

 private:
  void unpack(int64_t b) {
    const uint8_t* later = b + kBlocksAhead < blocks_ ? panels_ + (b + kBlocksAhead) * Block::kBytes
                                                      : next_ + (b + kBlocksAhead - blocks_) * Block::kBytes;
    for (int v = 0; v < V; v++) {
      for (int line = 0; line < Block::kBytes; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(later + v * apart_ + line), _MM_HINT_T0);
      unpack_block<Block>(panels_ + v * apart_ + b * Block::kBytes, ring_[b % kRing][v]);
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
struct TilesOf { using Type = Panels<V>; };
template <class Block, int V>
struct TilesOf<Blocks<Block>, V> { using Type = Unpacked<Block, V>; };

// R tiles of rows, the second so many rows behind the first, times V panels: `give(tile, v, sums of its rows)`.
template <class Format, int R, int V, class Give>
void multiply_tiles(const bf16* x, int64_t stride, int64_t second, const uint8_t* panels, int64_t apart,
                    const uint8_t* next, int64_t inputs, const Give& give) {
  typename TilesOf<Format, V>::Type tiles(panels, apart, next, inputs / kBlock);
  _tile_zero(0);
  if constexpr (V > 1) _tile_zero(1);
  if constexpr (R * V > 2 || R > 1) _tile_zero(2);
  if constexpr (R * V > 3) _tile_zero(3);
  for (int64_t b = 0; b < inputs / kBlock; b++) {
    const bf16* weights[V];
    tiles.find(b, weights);
    add_tiles<R, V>(x + b * kBlock, second * stride, stride * sizeof(bf16), weights);
  }
  alignas(64) float sums[4][kTileMost * kLanes];
  _tile_stored(0, sums[0], kTileBytes);
  if constexpr (V > 1) _tile_stored(1, sums[1], kTileBytes);
  if constexpr (R * V > 2 || R > 1) _tile_stored(2, sums[2], kTileBytes);
  if constexpr (R * V > 3) _tile_stored(3, sums[3], kTileBytes);
  Tiles::known(sums);
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) give(r, v, sums[2 * r + v]);
}

// Rows of one tile, or two, are multiplied with up to four panels at once, or two.
inline int64_t tiled_panels(int64_t rows) { return rows > kTileMost ? 2 : 4; }

// Of which size tiles are, nearly equal ones: the last may begin before the one before it ends.
inline int64_t tiled_rows(int64_t rows) {
  const int64_t tiles = (rows + kTileMost - 1) / kTileMost;
  return (rows + tiles - 1) / tiles;
}

// Rows times `count` panels, so many bytes apart: `give(row, v, sums)`. There are `Tiles` for these rows.
template <class Format, class Give>
void multiply_tiled(const bf16* x, int64_t rows, int64_t stride, const uint8_t* panels, int count,
                    int64_t apart, const uint8_t* next, int64_t inputs, const Give& give) {
  const int64_t size = tiled_rows(rows);
  for (int64_t row = 0; row < rows; row += 2 * size) {
    const int64_t from[2] = {std::min(row, rows - size), std::min(row + size, rows - size)};
    const auto take = [&](int r, int v, const float* sums) {
      for (int64_t i = std::min(row + r * size, rows) - from[r]; i < size; i++)
        give(from[r] + i, v, load(sums + i * kLanes));
    };
    const auto multiply = [&](auto tiles, auto num) {
      multiply_tiles<Format, tiles, num>(x + from[0] * stride, stride, from[1] - from[0], panels, apart, next,
                                         inputs, take);
    };
    using std::integral_constant;
    if (row + size < rows) {
      if (count == 2) multiply(integral_constant<int, 2>(), integral_constant<int, 2>());
      else multiply(integral_constant<int, 2>(), integral_constant<int, 1>());
    } else {
      switch (count) {
        case 4: multiply(integral_constant<int, 1>(), integral_constant<int, 4>()); break;
        case 3: multiply(integral_constant<int, 1>(), integral_constant<int, 3>()); break;
        case 2: multiply(integral_constant<int, 1>(), integral_constant<int, 2>()); break;
        default: multiply(integral_constant<int, 1>(), integral_constant<int, 1>());
      }
    }
  }
}

}  // namespace
