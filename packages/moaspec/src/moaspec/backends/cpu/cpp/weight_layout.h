// Weight formats, and the micro-kernel of bf16 weights, whose panels of 16 outputs are (I / 2, 16, 2).
//
// A format is a struct with these members, which `gemm.h` uses:
//
//   Input           type of the inputs that `tile` reads
//   kInputs         numbers of a row that one `Input` holds
//   kUnpacks        whether it has `unpack`, which writes a panel as bf16 weights
//   kMaxRows        rows of a tile, at most
//   max_panels      panels of a tile with this number of rows, at most
//   panels_at_once  panels that are multiplied together with this number of rows
//   panel_bytes     size of a panel
//   tile<M, V>      the micro-kernel: M rows of `x` (`stride` inputs apart) times V panels (`panel_stride`
//                   bytes apart). Near its end it prefetches the panels at `next`.
#pragma once

#include <cstdint>

#include "simd.h"

namespace {

constexpr int kTileRows = 8;        // rows for which a `Tile` has room
constexpr int kMaxPanels = 4;       // panels of a tile, at most
constexpr int kBlock = 32;          // inputs that share a scale and a zero point, in weights of 8 or 4 bits
constexpr int kPrefetchBlocks = 8;  // prefetch distance of these weights, in blocks

// Result of a micro-kernel: the sums of 16 outputs for each row and panel.
struct Tile {
  Floats sums[kTileRows][kMaxPanels];
};

// The address of step k of a panel, which has `count` steps of `bytes` bytes. Step `count` is the first of
// `next`.
inline const uint8_t* step_address(const uint8_t* panel, const uint8_t* next, int64_t k, int64_t count,
                                   int64_t bytes) {
  return k < count ? panel + k * bytes : next + (k - count) * bytes;
}

// The format of bf16 weights.
struct Bf16Weights {
  using Input = ::Input;
  static constexpr bool kUnpacks = false;
  static constexpr int kInputs = 1;
  static constexpr int kMaxRows = kBf16Rows;
  static constexpr int max_panels(int rows) { return bf16_panels(rows); }
  static int64_t panels_at_once(int64_t rows) { return max_panels(static_cast<int>(rows)); }
  static int64_t panel_bytes(int64_t inputs) { return inputs * kLanes * sizeof(bf16); }

  template <int M, int V>
  static void tile(const Input* x, int64_t stride, const uint8_t* panels, int64_t panel_stride,
                   const uint8_t* next, int64_t inputs, Tile& out) {
    constexpr int64_t kPair = 2 * kLanes * sizeof(bf16);
    const int64_t count = inputs / 2;
    Floats sums[M][V];
    unrolled<M>([&](auto m) { unrolled<V>([&](auto v) { sums[m][v] = broadcast(0.0f); }); });
    for (int64_t k = 0; k < count; k++) {
      const uint8_t* later = step_address(panels, next, k + kPrefetchPairs, count, kPair);
      for (int v = 0; v < V; v++) prefetch(later + v * panel_stride, kPair);
      add_products<M, V>(x + 2 * k, stride, panels + k * kPair, panel_stride, sums);
    }
    unrolled<M>([&](auto m) { unrolled<V>([&](auto v) { out.sums[m][v] = sums[m][v]; }); });
  }
};

}  // namespace
