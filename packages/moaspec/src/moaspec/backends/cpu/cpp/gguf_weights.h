// Weights in the bits of a GGUF file (`gguf_blocks.h`), multiplied without becoming bf16 weights first.
//
// The integers of codes are bf16 numbers. Their products with bf16 inputs are accumulated in float32 from zero for
// each 32 inputs (16 in Q6_K), in the order of the inputs; then scale * (this sum) and zero point * (sum of these
// inputs) are added. So the weights are exactly those of the file, and sums have the same bits for any number of rows.
//
// A panel of 16 outputs has two parts, for each block of the file's rows:
//   scales: 16 float16 scales and, in kinds that have them, 16 float16 zero points; then, in blocks of 256, for each
//     group of 32 inputs 16 int8 factors of the scale (twice in Q6_K) and 16 of the zero point;
//   codes: for each group of 32 inputs (16 pairs) `kBits` registers of 32 words of 16 bits. Word 2 o + e is of number e
//     of the pairs, for output o. Of 4 bits, register j has pairs 4 j to 4 j + 3, the first in the lowest bits. Bit 4 of
//     5 bits is in one more register, bit k of which is pair k's; bits 4 and 5 of 6 bits are in two more, of 8 pairs
//     each. Of 8 bits, each pair has 32 bytes, the integers.
#pragma once

#include <algorithm>

#include "gguf_blocks.h"
#include "weight_layout.h"
#ifdef __AVX512BF16__
#include "gguf_avx512.h"
#else
#include "gguf_avx2.h"
#endif

namespace {

// The inputs of a group, and their sum.
struct GroupInputs {
  Input numbers[kGroup];
  float sum;
};

inline void as_inputs(const bf16* from, int64_t count, GroupInputs* to) {
  for (int64_t i = 0; i < count; i += kGroup, to++) {
    as_inputs(from + i, kGroup, to->numbers);
    to->sum = reduce_sum(load(from + i) + load(from + i + kLanes));
  }
}

// Layout of a panel of a kind.
template <Kind K>
struct PanelLayout : KindTraits<K> {
  using T = KindTraits<K>;
  static constexpr int kGroups = T::kWeights / kGroup;  // of a block
  static constexpr int64_t kHalves = (1 + T::kHasZero) * kLanes * 2;  // bytes of a block's float16 numbers
  static constexpr int64_t kFactors = T::kHasSubscales ? (T::kScales + T::kHasZero) * kLanes : 0;  // of a group
  static constexpr int64_t kScaleBytes = kHalves + kGroups * kFactors;  // of a block
  static constexpr int64_t kCodeBytes = T::kBits * kGroup * kLanes / 8;  // of a group
  // Where the codes begin: at a cache line.
  static int64_t codes(int64_t inputs) { return (inputs / T::kWeights * kScaleBytes + 63) / 64 * 64; }
  static int64_t panel_bytes(int64_t inputs) { return codes(inputs) + inputs / kGroup * kCodeBytes; }
};

// The scales and zero points of a group, for 16 outputs.
template <Kind K>
struct GroupScales {
  using L = PanelLayout<K>;
  Floats scale[L::kScales], zero;

  // Of group `group` of a block whose scales are at `from`.
  GroupScales(const uint8_t* from, int group) {
    const Floats of_block = floats_of_halves(from);
    const uint8_t* const factors = from + L::kHalves + group * L::kFactors;
    for (int i = 0; i < L::kScales; i++)
      scale[i] = L::kHasSubscales ? of_block * floats_of_bytes(factors + i * kLanes) : of_block;
    if constexpr (L::kHasZero) {
      zero = floats_of_halves(from + 2 * kLanes);
      if constexpr (L::kHasSubscales)
        zero = broadcast(0.0f) - zero * floats_of_bytes(factors + L::kScales * kLanes);
    }
  }
};

// The micro-kernel of a kind, for M rows and `kGgufPanels` panels.
template <Kind K, int M>
class GgufTile {
 public:
  [[gnu::noinline]] static void run(const GroupInputs* x, int64_t stride, const uint8_t* panels, int64_t panel_stride,
                                    const uint8_t* next, int64_t inputs, Tile& out) {
    const int64_t groups = inputs / kGroup, first_code = L::codes(inputs);
    Floats sums[M][V];
    unrolled<M>([&](auto m) { unrolled<V>([&](auto v) { sums[m][v] = broadcast(0.0f); }); });
    for (int64_t g = 0; g < groups; g++) {
      const uint8_t* later =
          step_address(panels + first_code, next + first_code, g + kPrefetchBlocks, groups, L::kCodeBytes);
      for (int v = 0; v < V; v++) prefetch(later + v * panel_stride, L::kCodeBytes);
      const uint8_t* const codes = panels + first_code + g * L::kCodeBytes;
      const uint8_t* const scales = panels + g / L::kGroups * L::kScaleBytes;
      GroupCodes<K> readers[V];
      for (int v = 0; v < V; v++) readers[v] = GroupCodes<K>(codes + v * panel_stride);
      const auto scales_of = [&](int v) { return GroupScales<K>(scales + v * panel_stride, g % L::kGroups); };
      add<0>(x + g, stride, readers, scales_of, sums);
      if constexpr (L::kScales == 2) add<1>(x + g, stride, readers, scales_of, sums);
    }
    unrolled<M>([&](auto m) { unrolled<V>([&](auto v) { out.sums[m][v] = sums[m][v]; }); });
  }

 private:
  using L = PanelLayout<K>;
  static constexpr int V = kGgufPanels;

  // Accumulates the inputs that scale `part` of a group serves.
  template <int part, class ScalesOf>
  [[gnu::always_inline]] static void add(const GroupInputs* x, int64_t stride, GroupCodes<K> (&readers)[V],
                                         const ScalesOf& scales_of, Floats (&sums)[M][V]) {
    constexpr int kQuads = L::kScaled / 8;
    constexpr int64_t kStride = sizeof(GroupInputs) / sizeof(Input);
    Floats products[M][V];
    unrolled<M>([&](auto m) {
      unrolled<V>([&](auto v) { products[m][v] = broadcast(0.0f); });
    });
#pragma GCC unroll 1
    for (int quad = part * kQuads; quad < (part + 1) * kQuads; quad++) {
      for (int v = 0; v < V; v++) readers[v].start(quad);
      unrolled<4>([&](auto i) {
        add_pair<i>(readers, x->numbers + 8 * quad + 2 * i, stride * kStride, products);
      });
    }
    for (int v = 0; v < V; v++) {
      const GroupScales<K> of = scales_of(v);
      unrolled<M>([&](auto m) {
        sums[m][v] = multiply_add(of.scale[part], products[m][v], sums[m][v]);
        if constexpr (L::kHasZero) sums[m][v] = multiply_add(of.zero, broadcast(x[m * stride].sum), sums[m][v]);
      });
    }
  }
};

#ifndef __AVX512BF16__
// Adds the products of M rows with the unpacked weights of a group, (32, 16) in the order of its inputs, to `sums`,
// (M, 16). With AVX2 unpacking takes as long as the products of three rows, so more rows share it.
template <Kind K, int M>
[[gnu::noinline]] void add_unpacked(const GroupInputs* x, int64_t stride, const float* weights, const GroupScales<K>& of,
                                    float* sums) {
  using L = PanelLayout<K>;
  for (int part = 0; part < L::kScales; part++) {
    Floats products[M];
    unrolled<M>([&](auto m) { products[m] = broadcast(0.0f); });
    for (int i = part * L::kScaled; i < (part + 1) * L::kScaled; i++) {
      const Floats both = load(weights + i * kLanes);
      unrolled<M>([&](auto m) {
        const __m256 number = _mm256_broadcast_ss(x[m * stride].numbers + i);
        for (int half = 0; half < 2; half++) add_product(number, both.part[half], products[m].part[half]);
      });
    }
    unrolled<M>([&](auto m) {
      Floats sum = multiply_add(of.scale[part], products[m], load(sums + m * kLanes));
      if (L::kHasZero) sum = multiply_add(of.zero, broadcast(x[m * stride].sum), sum);
      store(sums + m * kLanes, sum);
    });
  }
}

// The products of all rows with a panel: (rows, 16).
template <Kind K>
void multiply_unpacked(const GroupInputs* x, int64_t rows, int64_t stride, const uint8_t* panel, int64_t inputs,
                       float* sums) {
  using L = PanelLayout<K>;
  std::fill_n(sums, rows * kLanes, 0.0f);
  alignas(32) float weights[kGroup * kLanes];
  for (int64_t g = 0; g < inputs / kGroup; g++, x++) {
    const uint8_t* const codes = panel + L::codes(inputs) + g * L::kCodeBytes;
    prefetch(codes + kPrefetchBlocks * L::kCodeBytes, L::kCodeBytes);
    GroupCodes<K> reader(codes);
    for (int quad = 0; quad < kGroup / 8; quad++) {
      reader.start(quad);
      unrolled<4>([&](auto i) {
        unrolled<2>([&](auto e) {
          float* const place = weights + (8 * quad + 2 * i + e) * kLanes;
          _mm256_store_ps(place, reader.template integers<i, e, 0>());
          _mm256_store_ps(place + 8, reader.template integers<i, e, 1>());
        });
      });
    }
    const GroupScales<K> of(panel + g / L::kGroups * L::kScaleBytes, g % L::kGroups);
    constexpr int kRows = 6;  // of two registers each, with two of weights and one of inputs
    for (int64_t row = 0; row < rows;) {
      const int64_t left = rows - row, tiles = (left + kRows - 1) / kRows, size = (left + tiles - 1) / tiles;
      const GroupInputs* const from = x + row * stride;
      float* const to = sums + row * kLanes;
      switch (size) {
        case 1: add_unpacked<K, 1>(from, stride, weights, of, to); break;
        case 2: add_unpacked<K, 2>(from, stride, weights, of, to); break;
        case 3: add_unpacked<K, 3>(from, stride, weights, of, to); break;
        case 4: add_unpacked<K, 4>(from, stride, weights, of, to); break;
        case 5: add_unpacked<K, 5>(from, stride, weights, of, to); break;
        default: add_unpacked<K, 6>(from, stride, weights, of, to);
      }
      row += size;
    }
  }
}
#endif

// The format of these weights. It is one type for all kinds, so that what calls micro-kernels is compiled once.
struct GgufWeights {
  using Input = GroupInputs;
  static constexpr bool kUnpacks = false;
  static constexpr int kInputs = kGroup;
  static constexpr int kMaxRows = kGgufRows;
  static constexpr int max_panels(int) { return kGgufPanels; }
  static int64_t panels_at_once(int64_t) { return kGgufPanels; }

  int64_t kind;

  int64_t panel_bytes(int64_t inputs) const {
    return with_kind(kind, [&](auto constant) { return PanelLayout<constant>::panel_bytes(inputs); });
  }
  template <int M, int V>
  void tile(const Input* x, int64_t stride, const uint8_t* panels, int64_t panel_stride, const uint8_t* next,
            int64_t inputs, Tile& out) const {
    if (V < kGgufPanels) panel_stride = 0;  // the last panel of an odd number, twice
    with_kind(kind, [&](auto constant) {
      GgufTile<constant, M>::run(x, stride, panels, panel_stride, next, inputs, out);
    });
  }
};

// Writes row `lane` of a panel.
template <Kind K>
void pack_row(const uint8_t* row, int64_t inputs, int lane, uint8_t* panel) {
  using L = PanelLayout<K>;
  uint8_t* const codes = panel + L::codes(inputs);
  Block block;
  for (int64_t b = 0; b < inputs / L::kWeights; b++) {
    read_block<K>(row + b * stored_bytes<K>(), block);
    uint8_t* const scales = panel + b * L::kScaleBytes;
    std::memcpy(scales + 2 * lane, &block.scale, 2);
    if constexpr (L::kHasZero) std::memcpy(scales + 2 * kLanes + 2 * lane, &block.zero, 2);
    for (int g = 0; g < L::kGroups; g++) {
      uint8_t* const factors = scales + L::kHalves + g * L::kFactors + lane;
      if constexpr (L::kHasSubscales) {
        for (int i = 0; i < L::kScales; i++) factors[i * kLanes] = block.subscales[g * L::kScales + i];
        if constexpr (L::kHasZero) factors[L::kScales * kLanes] = block.subzeros[g];
      }
      uint8_t* const group = codes + (b * L::kGroups + g) * L::kCodeBytes;
      uint16_t* const words = reinterpret_cast<uint16_t*>(group) + 2 * lane;
      const uint8_t* const from = block.codes + g * kGroup;
      for (int e = 0; e < 2; e++) {
        if constexpr (L::kBits == 8) {
          for (int k = 0; k < kGroup / 2; k++) group[2 * (k * kLanes + lane) + e] = from[2 * k + e] ^ 128;
        } else {
          for (int j = 0; j < 4; j++) {
            int word = 0;
            for (int k = 0; k < 4; k++) word |= (from[2 * (4 * j + k) + e] & 15) << 4 * k;
            words[j * 2 * kLanes + e] = word;
          }
          constexpr int kHigh = L::kBits - 4, kPairs = 16 / std::max(kHigh, 1);  // pairs of a word of high bits
          for (int j = 0; j < kHigh; j++) {
            int word = 0;
            for (int k = 0; k < kPairs; k++) word |= from[2 * (kPairs * j + k) + e] >> 4 << kHigh * k;
            words[(4 + j) * 2 * kLanes + e] = word;
          }
        }
      }
    }
  }
}

}  // namespace

extern "C" {

// Bytes of a panel of 16 outputs.
int64_t moaspec_gguf_panel_bytes(int64_t kind, int64_t inputs) {
  return with_kind(kind, [&](auto constant) { return PanelLayout<constant>::panel_bytes(inputs); });
}

// Packs stored rows, of `row_bytes` bytes each, into panels whose bytes are 0. Output i is row order[i].
void moaspec_gguf_pack(int64_t kind, const uint8_t* rows, int64_t row_bytes, const int64_t* order, int64_t outputs,
                       int64_t inputs, uint8_t* panels, int32_t threads) {
  with_kind(kind, [&](auto constant) {
    const int64_t bytes = PanelLayout<constant>::panel_bytes(inputs);
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < (outputs + kLanes - 1) / kLanes; panel++)
      for (int64_t i = panel * kLanes; i < std::min(outputs, (panel + 1) * kLanes); i++)
        pack_row<constant>(rows + order[i] * row_bytes, inputs, i % kLanes, panels + panel * bytes);
  });
}

}  // extern "C"
