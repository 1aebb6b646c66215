// Panels that are widened to float32 before many rows are multiplied with them, for CPUs with AVX2.
#pragma once

#include "panels.h"

namespace {

// Weights in 32 bits: (I, 16).
struct Single {
  static constexpr int kMostRows = 6;  // 6 * 2 sums, 2 of weights and a row's number fit 16 registers
  static constexpr int most_panels(int) { return 1; }
  static int64_t panels_at_once(int64_t) { return 1; }
  static int64_t panel_bytes(int64_t inputs) { return inputs * kLanes * sizeof(float); }

  // M rows times a panel. Numbers are added in the order of `Sixteen`.
  template <int M, int V>
  static void tile(const Input* x, int64_t stride, const uint8_t* panel, int64_t, const uint8_t*,
                   int64_t inputs, Tile& out) {
    const float* weights = reinterpret_cast<const float*>(panel);
    Floats sums[M];
    unrolled<M>([&](auto m) { sums[m] = all(0.0f); });
    for (int64_t k = 0; k < inputs; k++) {
      const Floats both = load(weights + k * kLanes);
      unrolled<M>([&](auto m) {
        sums[m] = multiply_add(all(x[m * stride + k]), both, sums[m]);
      });
    }
    unrolled<M>([&](auto m) { out.sums[m][0] = sums[m]; });
  }
};

// Weights of 16 bits that are widened.
struct Widened : Sixteen {
  static void unpack(const uint8_t* panel, int64_t inputs, uint8_t* to) {
    float* numbers = reinterpret_cast<float*>(to);
    for (int64_t k = 0; k < inputs; k += 2) {
      const Pairs both = pairs(words(panel + k * kLanes * sizeof(bf16)));
      store(numbers + k * kLanes, {both.first[0], both.first[1]});
      store(numbers + (k + 1) * kLanes, {both.second[0], both.second[1]});
    }
  }
};

}  // namespace
