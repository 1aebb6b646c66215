// W4A8: weights of 4 bits times inputs of 8 bits. Both are rounded, so it computes drafts only.
//
// Panels have the 4-bit layout of `quantized_blocks.h`. Each 32 inputs are rounded to int8 with the scale max
// |x| / 127. A block adds weight scale * input scale * (dot product of the codes), plus zero point * (sum of
// the inputs before rounding). An integer dot product takes one or two instructions for a register, and a
// draft step reads a third of the bytes of bf16.
#pragma once

#include "weight_layout.h"

namespace {

constexpr float kMinMagnitude = 1e-30f;  // inputs below it are rounded to 0: 127 / max |x| must be finite

// A block of 32 inputs of a row. The first and second numbers of pairs have sums of their own.
struct RoundedInputs {
  int8_t codes[4][8];  // of each 16 inputs the even pairs, then the odd ones (`kEvenPairsFirst`)
  float scale;
  float sums[2];  // of the inputs before rounding: the pairs' first numbers, and their second numbers
};

// Rounds `count` inputs, a multiple of 32.
inline void as_inputs(const bf16* from, int64_t count, RoundedInputs* to) {
  for (int64_t b = 0; b < count / kBlock; b++) {
    const Floats numbers[2] = {load(from + b * kBlock), load(from + b * kBlock + kLanes)};
    const float most = reduce_max(maximum(absolute(numbers[0]), absolute(numbers[1])));
    const Floats steps = broadcast(most > kMinMagnitude ? 127 / most : 0.0f);
    RoundedInputs& block = to[b];
    block.scale = most / 127;
    for (int group = 0; group < 2; group++)
      store_int8(block.codes[2 * group], numbers[group] * steps);
    float both[kLanes];
    store(both, numbers[0] + numbers[1]);
    block.sums[0] = block.sums[1] = 0;
    for (int i = 0; i < kLanes; i++) block.sums[i % 2] += both[i];
  }
}

// The format of W4A8 weights.
struct W4A8Weights {
  using Input = RoundedInputs;
  static constexpr bool kUnpacks = false;
  static constexpr int kInputs = kBlock;
  static constexpr int kMaxRows = kW4A8Rows;
  static constexpr int kBytes = 4 * kLanes + kBlock * kLanes / 2;
  static constexpr int max_panels(int) { return 1; }
  static int64_t panels_at_once(int64_t) { return 1; }
  static int64_t panel_bytes(int64_t inputs) { return inputs / kBlock * kBytes; }

  template <int M, int V>
  static void tile(const Input* x, int64_t stride, const uint8_t* panel, int64_t,
                   const uint8_t* next, int64_t inputs, Tile& out) {
    static_assert(V == 1);
    const int64_t blocks = inputs / kBlock;
    Register sums[M][kParts];
    unrolled<M>([&](auto m) { unrolled<kParts>([&](auto q) { sums[m][q] = repeated(0.0f); }); });
    for (int64_t b = 0; b < blocks; b++) {
      prefetch(step_address(panel, next, b + kPrefetchBlocks, blocks, kBytes), kBytes);
      add<M>(x + b, stride, panel + b * kBytes, sums);
    }
    unrolled<M>([&](auto m) { out.sums[m][0] = add_lane_pairs(sums[m]); });
  }

 private:
  // Accumulates one block.
  template <int M>
  [[gnu::always_inline]] static void add(const Input* x, int64_t stride, const uint8_t* block,
                                         Register (&sums)[M][kParts]) {
    const uint8_t* words = block + 4 * kLanes;
    Register scale[kParts], zero[kParts];
    load_halves_twice(block, scale);
    load_halves_twice(block + 2 * kLanes, zero);
    unrolled<kParts>([&](auto q) {
      Bytes codes[4];
      unrolled<2>([&](auto group) {
        const Bytes both = bytes(words + (group * kParts + q) * sizeof(Bytes));
        codes[2 * group] = low_nibbles(both);
        codes[2 * group + 1] = high_nibbles(both);
      });
      unrolled<M>([&](auto m) {
        const Input& row = x[m * stride];
        sums[m][q] = multiply_add(scale[q] * repeated(row.scale), dot_products(codes, row.codes), sums[m][q]);
        sums[m][q] = multiply_add(zero[q], repeated(row.sums), sums[m][q]);
      });
    });
  }
};

}  // namespace
