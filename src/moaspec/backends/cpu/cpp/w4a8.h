// Weights in four bits times inputs in eight, for what may be rounded: drafts.
//
// Panels are laid out as `quantized_blocks.h` says. Inputs are rounded to 127 steps of the largest of each 32,
// so that a register of products takes one or two instructions; a block's sum is its scale times these
// products, plus its zero times the sum of the inputs. A draft step reads a third of the bytes of 16 bits.
#pragma once

#include "weight_layout.h"

namespace {

constexpr float kSmallest = 1e-30f;  // of what is told from zero: steps of less are not finite

// 32 inputs. Halves of a pair are lanes of their own until the end of a product.
struct RoundedInputs {
  int8_t codes[4][8];  // of a group of 8 pairs, the even ones and the odd ones, by half of the pair
  float scale;
  float sums[2];  // of the inputs themselves, by half of the pair
};

inline void as_inputs(const bf16* from, int64_t count, RoundedInputs* to) {
  for (int64_t b = 0; b < count / kBlock; b++) {
    const Floats numbers[2] = {load(from + b * kBlock), load(from + b * kBlock + kLanes)};
    const float most = reduce_max(larger(magnitude(numbers[0]), magnitude(numbers[1])));
    const Floats steps = all(most > kSmallest ? 127 / most : 0.0f);
    RoundedInputs& block = to[b];
    block.scale = most / 127;
    for (int group = 0; group < 2; group++)
      store_nearest(block.codes[2 * group], numbers[group] * steps);
    float both[kLanes];
    store(both, numbers[0] + numbers[1]);
    block.sums[0] = block.sums[1] = 0;
    for (int i = 0; i < kLanes; i++) block.sums[i % 2] += both[i];
  }
}

struct Nibbles {
  using Input = RoundedInputs;
  static constexpr bool kUnpacks = false;
  static constexpr int kInputs = kBlock;
  static constexpr int kMostRows = kRowsOfNibbles;
  static constexpr int kBytes = 4 * kLanes + kBlock * kLanes / 2;
  static constexpr int most_panels(int) { return 1; }
  static int64_t panels_at_once(int64_t) { return 1; }
  static int64_t panel_bytes(int64_t inputs) { return inputs / kBlock * kBytes; }

  // M rows times one panel.
  template <int M, int V>
  static void tile(const Input* x, int64_t stride, const uint8_t* panel, int64_t,
                   const uint8_t* next, int64_t inputs, Tile& out) {
    static_assert(V == 1);
    const int64_t blocks = inputs / kBlock;
    Register sums[M][kParts];
    unrolled<M>([&](auto m) { unrolled<kParts>([&](auto q) { sums[m][q] = repeated(0.0f); }); });
    for (int64_t b = 0; b < blocks; b++) {
      prefetch(step_of(panel, next, b + kBlocksAhead, blocks, kBytes), kBytes);
      add<M>(x + b, stride, panel + b * kBytes, sums);
    }
    unrolled<M>([&](auto m) { out.sums[m][0] = halves_added(sums[m]); });
  }

 private:
  template <int M>
  [[gnu::always_inline]] static void add(const Input* x, int64_t stride, const uint8_t* block,
                                         Register (&sums)[M][kParts]) {
    const uint8_t* words = block + 4 * kLanes;
    Register scale[kParts], zero[kParts];
    spread(block, scale);
    spread(block + 2 * kLanes, zero);
    unrolled<kParts>([&](auto q) {
      Bytes codes[4];
      unrolled<2>([&](auto group) {
        const Bytes both = bytes(words + (group * kParts + q) * sizeof(Bytes));
        codes[2 * group] = low_nibbles(both);
        codes[2 * group + 1] = high_nibbles(both);
      });
      unrolled<M>([&](auto m) {
        const Input& row = x[m * stride];
        sums[m][q] = multiply_add(scale[q] * repeated(row.scale), dots(codes, row.codes), sums[m][q]);
        sums[m][q] = multiply_add(zero[q], repeated(row.sums), sums[m][q]);
      });
    });
  }
};

}  // namespace
