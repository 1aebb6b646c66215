// Weights as GGUF files store them: rows of blocks, each of 32 or 256 weights with scales of their own.
//
// A weight is scale * (integer of its code), plus a zero point in some kinds, all in float32. The integer of a
// code is an entry of a table, or the code less a constant; it has at most eight bits, so it is a bf16 number.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace {

// Kinds of blocks, by ggml's numbers.
enum class Kind : int64_t {
  kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kIQ4_NL = 20, kIQ4_XS = 23
};

constexpr int kGroup = 32;        // weights that one zero point serves, in every kind
constexpr int kMaxWeights = 256;  // of a block

// The integers of IQ4's codes.
constexpr int kIQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

template <Kind K>
struct KindTraits {
  static constexpr bool kHasSubscales =
      K == Kind::kQ4_K || K == Kind::kQ5_K || K == Kind::kQ6_K || K == Kind::kIQ4_XS;
  static constexpr int kWeights = kHasSubscales ? kMaxWeights : kGroup;  // of a block
  static constexpr int kBits = K == Kind::kQ8_0 ? 8 : K == Kind::kQ6_K ? 6
      : K == Kind::kQ5_0 || K == Kind::kQ5_1 || K == Kind::kQ5_K ? 5 : 4;  // of a code
  static constexpr bool kHasZero = K == Kind::kQ4_1 || K == Kind::kQ5_1 || K == Kind::kQ4_K || K == Kind::kQ5_K;
  static constexpr bool kIsTable = K == Kind::kIQ4_NL || K == Kind::kIQ4_XS;
  static constexpr int kScaled = K == Kind::kQ6_K ? 16 : kGroup;  // weights that one scale serves
  static constexpr int kScales = kGroup / kScaled;                // of a group
  static constexpr int kLowest = kHasZero ? 0 : -(1 << (kBits - 1));  // integer of code 0
  static constexpr int integer(int code) { return kIsTable ? kIQ4[code % 16] : code + kLowest; }
};

// A block, taken apart.
struct Block {
  uint16_t scale, zero;            // float16; `zero` is 0 where the kind has none
  int8_t subscales[16];            // multiply `scale`; 1 where the kind has none
  int8_t subzeros[8];              // multiply `zero`, for each group
  uint8_t codes[kMaxWeights];
};

inline uint16_t half_at(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return bits;
}

// Bytes of a stored block.
template <Kind K>
constexpr int stored_bytes() {
  switch (K) {
    case Kind::kQ4_0: case Kind::kIQ4_NL: return 18;
    case Kind::kQ4_1: return 20;
    case Kind::kQ5_0: return 22;
    case Kind::kQ5_1: return 24;
    case Kind::kQ8_0: return 34;
    case Kind::kQ4_K: return 144;
    case Kind::kQ5_K: return 176;
    case Kind::kQ6_K: return 210;
    default: return 136;
  }
}

// The six-bit scales and zero points of the eight groups of Q4_K and Q5_K, in twelve bytes.
inline void read_six_bits(const uint8_t* from, int8_t* scales, int8_t* zeros) {
  for (int i = 0; i < 4; i++) {
    scales[i] = from[i] & 63;
    zeros[i] = from[i + 4] & 63;
    scales[i + 4] = (from[i + 8] & 15) | from[i] >> 6 << 4;
    zeros[i + 4] = from[i + 8] >> 4 | from[i + 4] >> 6 << 4;
  }
}

// Sixteen bytes of two codes each: the low four bits are codes 0 to 15.
inline void read_nibbles(const uint8_t* from, uint8_t* codes, int bytes = 16) {
  for (int i = 0; i < bytes; i++) {
    codes[i] = from[i] & 15;
    codes[i + bytes] = from[i] >> 4;
  }
}

template <Kind K>
void read_block(const uint8_t* from, Block& to) {
  using Traits = KindTraits<K>;
  to.zero = 0;
  if constexpr (!Traits::kHasSubscales) {
    std::memset(to.subscales, 1, sizeof(to.subscales));
    std::memset(to.subzeros, 1, sizeof(to.subzeros));
    to.scale = half_at(from);
    from += 2;
    if constexpr (Traits::kHasZero) {
      to.zero = half_at(from);
      from += 2;
    }
    if constexpr (Traits::kBits == 8) {
      for (int i = 0; i < kGroup; i++) to.codes[i] = from[i] ^ 128;
      return;
    }
    uint32_t fifth = 0;
    if constexpr (Traits::kBits == 5) {
      std::memcpy(&fifth, from, sizeof(fifth));
      from += 4;
    }
    read_nibbles(from, to.codes);
    for (int i = 0; i < kGroup; i++) to.codes[i] |= (fifth >> i & 1) << 4;
  } else if constexpr (K == Kind::kQ6_K) {
    const uint8_t *low = from, *high = from + 128;
    for (int half = 0; half < 2; half++, low += 64, high += 32) {
      uint8_t* const codes = to.codes + 128 * half;
      read_nibbles(low, codes, 64);
      for (int i = 0; i < 128; i++) codes[i] |= (high[i % 32] >> i / 32 * 2 & 3) << 4;
    }
    std::memcpy(to.subscales, from + 192, 16);
    to.scale = half_at(from + 208);
  } else if constexpr (K == Kind::kIQ4_XS) {
    to.scale = half_at(from);
    const int high = half_at(from + 2);
    for (int i = 0; i < 8; i++) {
      const int low = from[4 + i / 2] >> i % 2 * 4 & 15;
      to.subscales[i] = static_cast<int8_t>((low | (high >> 2 * i & 3) << 4) - 32);
      read_nibbles(from + 8 + 16 * i, to.codes + kGroup * i);
    }
  } else {
    to.scale = half_at(from);
    to.zero = half_at(from + 2);
    read_six_bits(from + 4, to.subscales, to.subzeros);
    constexpr int kCodes = K == Kind::kQ5_K ? 48 : 16;
    for (int i = 0; i < 4; i++) read_nibbles(from + kCodes + 32 * i, to.codes + 64 * i, 32);
    if constexpr (K == Kind::kQ5_K)
      for (int i = 0; i < kMaxWeights; i++) to.codes[i] |= (from[16 + i % 32] >> i / 32 & 1) << 4;
  }
}

inline float from_float16(uint16_t bits) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))); }

// The weights of a block, as float32 arithmetic gives them: product, then sum.
template <Kind K>
void dequantise(const Block& block, float* to) {
  using Traits = KindTraits<K>;
  // In Q4_K and Q5_K the zero point is subtracted.
  const float zero = Traits::kHasSubscales ? -from_float16(block.zero) : from_float16(block.zero);
  for (int i = 0; i < Traits::kWeights; i++) {
    const float scale = from_float16(block.scale) * block.subscales[i / Traits::kScaled];
    const volatile float product = scale * Traits::integer(block.codes[i]);  // rounded: no fused addition
    to[i] = Traits::kHasZero ? product + zero * block.subzeros[i / kGroup] : product;
  }
}

// Calls use(constant) with a kind.
template <class Use>
auto with_kind(int64_t kind, const Use& use) {
  using std::integral_constant;
  switch (static_cast<Kind>(kind)) {
    case Kind::kQ4_0: return use(integral_constant<Kind, Kind::kQ4_0>());
    case Kind::kQ4_1: return use(integral_constant<Kind, Kind::kQ4_1>());
    case Kind::kQ5_0: return use(integral_constant<Kind, Kind::kQ5_0>());
    case Kind::kQ5_1: return use(integral_constant<Kind, Kind::kQ5_1>());
    case Kind::kQ8_0: return use(integral_constant<Kind, Kind::kQ8_0>());
    case Kind::kQ4_K: return use(integral_constant<Kind, Kind::kQ4_K>());
    case Kind::kQ5_K: return use(integral_constant<Kind, Kind::kQ5_K>());
    case Kind::kQ6_K: return use(integral_constant<Kind, Kind::kQ6_K>());
    case Kind::kIQ4_NL: return use(integral_constant<Kind, Kind::kIQ4_NL>());
    default: return use(integral_constant<Kind, Kind::kIQ4_XS>());
  }
}

}  // namespace

extern "C" {

// Token embeddings, (vocabulary, width).
struct Embeddings {
  const void* rows;
  int64_t kind;  // of the blocks; 0: bf16
};

}  // extern "C"

namespace {

// Copies the embedding of a token, (width), in bf16.
inline void embed(const Embeddings& table, int64_t token, int64_t width, bf16* to) {
  if (!table.kind) {
    std::memcpy(to, static_cast<const bf16*>(table.rows) + token * width, width * sizeof(bf16));
    return;
  }
  with_kind(table.kind, [&](auto constant) {
    constexpr Kind K = constant;
    constexpr int kWeights = KindTraits<K>::kWeights, kBytes = stored_bytes<K>();
    const uint8_t* from = static_cast<const uint8_t*>(table.rows) + token * (width / kWeights) * kBytes;
    Block block;
    float weights[kWeights];
    for (int64_t i = 0; i < width; i += kWeights, from += kBytes) {
      read_block<K>(from, block);
      dequantise<K>(block, weights);
      for (int j = 0; j < kWeights; j += kLanes) store(to + i + j, load(weights + j));
    }
  });
}

}  // namespace
