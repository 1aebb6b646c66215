// Weights in the bits of a GGUF file (`gguf_weights.h`) times inputs rounded to 8 bits: integer products.
//
// Each 32 inputs are rounded to int8 with the scale max |x| / 127. A code's byte is its integer less a constant, so a
// dot product of integers begins with constant * (sum of the rounded inputs) and adds bytes * rounded inputs. It is
// exact. A group of 32 inputs then adds weight scale * (input scale * dot product), and zero point * (sum of the
// rounded inputs), in float32 and in the order of groups. So sums have the same bits for any number of rows and on
// every instruction set.
//
// The codes of some groups become bytes once for all rows: (8 registers, 16 outputs, 4 inputs) for each group.
#pragma once

#include <algorithm>

#include "gguf_weights.h"
#include "w4a8.h"
#ifdef __AVX512BF16__
#include "integers_avx512.h"
#else
#include "integers_avx2.h"
#endif

namespace {

constexpr int kUnpackedGroups = 8;             // groups whose bytes are multiplied with all rows before the next ones
constexpr int kFewGroups = 2;                  // the same with rows of one tile: they wait for memory, not in bursts
constexpr int kGroupRegisters = kGroup / 4;    // of bytes, in a group
constexpr int kRegisterBytes = 4 * kLanes;     // four for each output

// The order of inputs in bytes: of each 8 inputs those whose codes are low nibbles, then those of high nibbles.
alignas(16) constexpr uint8_t kNibbleOrder[16] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};

// A group of inputs, rounded.
struct GroupBytes {
  int8_t numbers[kGroup];  // in `kNibbleOrder`
  float scale, sum;        // `sum` of scale * number
  int32_t sums[2];         // of numbers: of 0 to 15, and of 16 to 31
};

inline void as_inputs(const bf16* from, int64_t count, GroupBytes* to) {
  for (int64_t i = 0; i < count; i += kGroup, to++) {
    const Floats numbers[2] = {load(from + i), load(from + i + kLanes)};
    const float most = reduce_max(maximum(absolute(numbers[0]), absolute(numbers[1])));
    const bool is_zero = !(most > kMinMagnitude);
    const Floats steps = broadcast(is_zero ? 0.0f : 127 / most);
    to->scale = is_zero ? 0.0f : most / 127;
    for (int half = 0; half < 2; half++) {
      const Floats nearest = nearest_integer(numbers[half] * steps);
      store_int8(to->numbers + half * kLanes, nearest, kNibbleOrder);
      to->sums[half] = static_cast<int32_t>(reduce_sum(nearest));
    }
    to->sum = to->scale * static_cast<float>(to->sums[0] + to->sums[1]);
  }
}

// The integer of a code less its byte.
template <Kind K>
constexpr int kByteConstant =
    KindTraits<K>::kBits < 8 && !KindTraits<K>::kIsTable ? KindTraits<K>::kLowest : kSignedBytes ? 0 : -128;

// The bytes of IQ4's codes.
struct TableBytes {
  alignas(16) uint8_t of[16];
  constexpr TableBytes() : of() {
    for (int i = 0; i < 16; i++) of[i] = static_cast<uint8_t>(kIQ4[i] - kByteConstant<Kind::kIQ4_NL>);
  }
};
constexpr TableBytes kTableBytes;

// Groups of a panel, unpacked.
template <Kind K>
struct UnpackedGroups {
  using L = PanelLayout<K>;
  alignas(64) uint8_t bytes[kUnpackedGroups][kGroupRegisters][kRegisterBytes];
  alignas(64) float scale[kUnpackedGroups][L::kScales][kLanes], zero[kUnpackedGroups][kLanes];

  void unpack(int group, const uint8_t* codes, const GroupScales<K>& of) {
    for (int i = 0; i < L::kScales; i++) store(scale[group][i], of.scale[i]);
    if constexpr (L::kHasZero) store(zero[group], of.zero);
    for (int offset = 0; offset < kRegisterBytes; offset += sizeof(Bytes))
      unpack_codes(codes, offset, bytes[group]);
  }

 private:
  static constexpr int kBits = L::kBits;

  // Bytes `offset` to `offset` + sizeof(Bytes) - 1 of each register.
  static void unpack_codes(const uint8_t* codes, int offset, uint8_t (*to)[kRegisterBytes]) {
    unrolled<4>([&](auto quad) {
      Bytes both[2];  // of low nibbles, of high nibbles
      if constexpr (kBits == 8) {
        const uint8_t* const pairs = codes + quad * 128 + offset / 2;
        for (int i = 0; i < 2; i++) both[i] = interleaved(pairs + i * 2 * kLanes, pairs + (i + 2) * 2 * kLanes);
        if constexpr (!kSignedBytes)
          for (Bytes& one : both) one = flipped(one, 128);
      } else {
        const Bytes nibbles = ::bytes(codes + quad * 64 + offset);
        both[0] = low_nibbles(nibbles);
        both[1] = high_nibbles(nibbles);
        if constexpr (L::kIsTable)
          for (Bytes& one : both) one = look_up(kTableBytes.of, one);
        constexpr int kHigh = kBits - 4;
        if constexpr (kHigh > 0) {
          constexpr int kQuads = 4 / kHigh;  // that share a word of high bits
          const Bytes high = ::bytes(codes + (4 + quad / kQuads) * 64 + offset);
          unrolled<2>([&](auto i) {
            // Pairs i and i + 2 of the quad: bytes 0 and 1 of a word.
            constexpr int kFirst = (4 * (quad % kQuads) + i) * kHigh, kMask = ((1 << kHigh) - 1) << 4;
            both[i] = with_bits<kFirst - 4, kMask>(both[i], high);
            both[i] = with_bits<kFirst + 2 * kHigh - 12, kMask << 8>(both[i], high);
          });
        }
      }
      for (int i = 0; i < 2; i++) store_bytes(to[2 * quad + i] + offset, both[i]);
    });
  }

  // Adds the bits of `mask`, of words of 16 bits, from `words` shifted right by `shift` (left if it is negative).
  template <int shift, int mask>
  static Bytes with_bits(Bytes to, Bytes words) { return added_bits(to, shifted<shift>(words), mask); }
};

// Adds the products of M rows with `groups` unpacked groups to `sums`, (M, 16).
template <Kind K, int M>
[[gnu::noinline]] void add_integers(const GroupBytes* x, int64_t stride, const UnpackedGroups<K>& weights, int groups,
                                    float* sums) {
  using L = PanelLayout<K>;
  constexpr int kRegisters = kGroupRegisters / L::kScales;  // that one scale serves
  for (int lane = 0; lane < kLanes; lane += kDotLanes) {
    DotFloats totals[M];
    unrolled<M>([&](auto m) { load_to(totals[m], sums + m * kLanes + lane); });
    const GroupBytes* row = x;
    for (int g = 0; g < groups; g++, row++)
      unrolled<L::kScales>([&](auto part) {
        DotProducts<K> dots[M];
        unrolled<M>([&](auto m) {
          const int32_t* const halves = row[m * stride].sums;
          dots[m].start(kByteConstant<K> * (L::kScales == 2 ? halves[part] : halves[0] + halves[1]));
        });
        unrolled<kRegisters>([&](auto i) {
          constexpr int r = part * kRegisters + i;
          const Bytes codes = bytes(weights.bytes[g][r] + 4 * lane);
          unrolled<M>([&](auto m) { dots[m].template add<i>(codes, row[m * stride].numbers + 4 * r); });
        });
        unrolled<M>([&](auto m) {
          add_product(totals[m], weights.scale[g][part] + lane, dots[m].times(row[m * stride].scale));
          if constexpr (L::kHasZero) add_product(totals[m], weights.zero[g] + lane, repeated(row[m * stride].sum));
        });
      });
    unrolled<M>([&](auto m) { store_from(sums + m * kLanes + lane, totals[m]); });
  }
}

// The products of all rows with a panel: (rows, 16).
template <Kind K>
void multiply_integers(const GroupBytes* x, int64_t rows, int64_t stride, const uint8_t* panel, const uint8_t* next,
                       int64_t inputs, float* sums) {
  using L = PanelLayout<K>;
  std::fill_n(sums, rows * kLanes, 0.0f);
  UnpackedGroups<K> weights;
  const int64_t groups = inputs / kGroup, first_code = L::codes(inputs);
  const int64_t together = rows <= kIntegerRows ? kFewGroups : kUnpackedGroups;
  for (int64_t first = 0; first < groups; first += together) {
    const int count = static_cast<int>(std::min(together, groups - first));
    for (int i = 0; i < count; i++) {
      const int64_t g = first + i;
      prefetch(step_address(panel + first_code, next + first_code, g + kIntegerPrefetch, groups, L::kCodeBytes),
               L::kCodeBytes);
      weights.unpack(i, panel + first_code + g * L::kCodeBytes,
                     GroupScales<K>(panel + g / L::kGroups * L::kScaleBytes, g % L::kGroups));
    }
    for (int64_t row = 0; row < rows;) {
      const int64_t left = rows - row, tiles = (left + kIntegerRows - 1) / kIntegerRows;
      const int64_t size = (left + tiles - 1) / tiles;
      const GroupBytes* const from = x + row * stride + first;
      float* const to = sums + row * kLanes;
      unrolled<kIntegerRows>([&](auto m) {
        if (size == m + 1) add_integers<K, m + 1>(from, stride, weights, count, to);
      });
      row += size;
    }
  }
}

// The format of these products; the weights are those of `GgufWeights`.
struct GgufIntegers : GgufWeights {
  using Input = GroupBytes;
  static int64_t panels_at_once(int64_t) { return 1; }
};

}  // namespace
