// Weights in panels of 16 outputs, each laid out as (I / 2, 16, 2), and rows times a few of them.
#pragma once

#include <cstdint>

#include "simd.h"

namespace {

constexpr int kTileRows = 8;    // rows of a tile, at most
constexpr int kMostPanels = 4;  // panels of a tile, at most
constexpr int kBlock = 32;    // inputs that share a scale and a zero, where weights have fewer bits
constexpr int kBlocksAhead = 4;  // blocks that such weights are fetched ahead of their use

// Sums of 16 outputs each.
struct Tile {
  Floats sums[kTileRows][kMostPanels];
};

// Where step k of a panel lies, of `count` steps of `bytes` bytes; the next panel's follow the last.
inline const uint8_t* step_of(const uint8_t* panel, const uint8_t* next, int64_t k, int64_t count,
                              int64_t bytes) {
  return k < count ? panel + k * bytes : next + (k - count) * bytes;
}

// Weights as they are, 16 bits each.
struct Sixteen {
  using Input = ::Input;
  static constexpr bool kUnpacks = false;
  static constexpr int kInputs = 1;  // that one `Input` stands for
  static constexpr int kMostRows = kRowsOfTile;
  static constexpr int most_panels(int rows) { return panels_of_tile(rows); }
  static int64_t panels_at_once(int64_t rows) { return most_panels(static_cast<int>(rows)); }
  static int64_t panel_bytes(int64_t inputs) { return inputs * kLanes * sizeof(bf16); }

  // M rows times V panels.
  template <int M, int V>
  static void tile(const Input* x, int64_t stride, const uint8_t* panels, int64_t panel_size,
                   const uint8_t* next, int64_t inputs, Tile& out) {
    constexpr int64_t kPair = 2 * kLanes * sizeof(bf16);
    const int64_t count = inputs / 2;
    Floats sums[M][V];
    unrolled<M>([&](auto m) { unrolled<V>([&](auto v) { sums[m][v] = all(0.0f); }); });
    for (int64_t k = 0; k < count; k++) {
      const uint8_t* later = step_of(panels, next, k + kAhead, count, kPair);
      for (int v = 0; v < V; v++) prefetch(later + v * panel_size, kPair);
      add_products<M, V>(x + 2 * k, stride, panels + k * kPair, panel_size, sums);
    }
    unrolled<M>([&](auto m) { unrolled<V>([&](auto v) { out.sums[m][v] = sums[m][v]; }); });
  }
};

}  // namespace
