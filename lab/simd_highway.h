// `simd.h` by Google Highway, for every CPU that it knows with vectors of 16 to 64 bytes.
#pragma once

#include <cstring>

#include "hwy/highway.h"

namespace {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, kLanes>;
using DWords = hn::RebindToUnsigned<D>;
using DInts = hn::RebindToSigned<D>;
using DHalves = hn::Rebind<hwy::bfloat16_t, D>;
using Vec = hn::Vec<D>;
constexpr int kPerPiece = hn::MaxLanes(D());
constexpr int kPieces = kLanes / kPerPiece;

// Sixteen of anything, as registers.
struct Floats { Vec part[kPieces]; };
struct Mask { hn::Mask<D> part[kPieces]; };
struct Words { hn::Vec<DWords> part[kPieces]; };

template <class Make>
[[gnu::always_inline]] inline Floats each(const Make& make) {
  Floats out;
  unrolled<kPieces>([&](auto i) { out.part[i] = make(i); });
  return out;
}
template <class Make>
[[gnu::always_inline]] inline Mask each_mask(const Make& make) {
  Mask out;
  unrolled<kPieces>([&](auto i) { out.part[i] = make(i); });
  return out;
}

#if HWY_NATIVE_DOT_BF16
using Input = bf16;
constexpr int kBf16Rows = 6;
constexpr int bf16_panels(int) { return 4; }
constexpr int kPrefetchPairs = 32;
constexpr int kRegisterQueries = 8;
constexpr int kValueRegisters = 2;
constexpr int kW4A8Rows = 6;
#else
using Input = float;
constexpr int kBf16Rows = 5;
constexpr int bf16_panels(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
constexpr int kPrefetchPairs = 64;
constexpr int kRegisterQueries = 4;
constexpr int kValueRegisters = 1;
constexpr int kW4A8Rows = 4;
#endif

inline Floats operator+(Floats a, Floats b) {
  return each([&](auto i) { return hn::Add(a.part[i], b.part[i]); });
}
inline Floats operator-(Floats a, Floats b) {
  return each([&](auto i) { return hn::Sub(a.part[i], b.part[i]); });
}
inline Floats operator*(Floats a, Floats b) {
  return each([&](auto i) { return hn::Mul(a.part[i], b.part[i]); });
}
inline Floats operator/(Floats a, Floats b) {
  return each([&](auto i) { return hn::Div(a.part[i], b.part[i]); });
}

inline Floats broadcast(float number) { return each([&](auto) { return hn::Set(D(), number); }); }
inline Floats load(const float* from) {
  return each([&](auto i) { return hn::LoadU(D(), from + i * kPerPiece); });
}
inline const hwy::bfloat16_t* halves(const bf16* from) {
  return reinterpret_cast<const hwy::bfloat16_t*>(from);
}
inline hwy::bfloat16_t* halves(bf16* to) { return reinterpret_cast<hwy::bfloat16_t*>(to); }
inline Floats load(const bf16* from) {
  return each([&](auto i) { return hn::PromoteTo(D(), hn::LoadU(DHalves(), halves(from) + i * kPerPiece)); });
}

inline void store(float* to, Floats x) {
  unrolled<kPieces>([&](auto i) { hn::StoreU(x.part[i], D(), to + i * kPerPiece); });
}
inline void store(bf16* to, Floats x) {
  unrolled<kPieces>([&](auto i) {
    hn::StoreU(hn::DemoteTo(DHalves(), x.part[i]), DHalves(), halves(to) + i * kPerPiece);
  });
}
template <class Number>
inline void store(Number* to, Floats x, int64_t count) {
  if (count >= kLanes) return store(to, x);
  Number numbers[kLanes];
  store(numbers, x);
  std::memcpy(to, numbers, count * sizeof(Number));
}
inline bf16 rounded(float number) {
  bf16 numbers[kPerPiece];
  hn::StoreU(hn::DemoteTo(DHalves(), hn::Set(D(), number)), DHalves(), halves(numbers));
  return numbers[0];
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return each([&](auto i) { return hn::MulAdd(a.part[i], b.part[i], c.part[i]); });
}
inline Floats subtract_product(Floats a, Floats b, Floats c) {
  return each([&](auto i) { return hn::NegMulAdd(a.part[i], b.part[i], c.part[i]); });
}
inline Floats maximum(Floats a, Floats b) {
  return each([&](auto i) { return hn::Max(a.part[i], b.part[i]); });
}
inline Floats absolute(Floats x) { return each([&](auto i) { return hn::Abs(x.part[i]); }); }
inline Floats nearest_integer(Floats x) { return each([&](auto i) { return hn::Round(x.part[i]); }); }
inline Floats times_power_of_two(Floats x, Floats power) {
#if HWY_TARGET <= HWY_AVX3
  return each([&](auto i) { return hn::MulByFloorPow2(x.part[i], power.part[i]); });
#else
  return each([&](auto i) {
    const auto exponent = hn::Add(hn::ConvertTo(DInts(), power.part[i]), hn::Set(DInts(), 127));
    return hn::Mul(x.part[i], hn::BitCast(D(), hn::ShiftLeft<23>(exponent)));
  });
#endif
}

// Folded by halves, so that a sum has the same bits whatever the size of registers.
template <class DV, class V, class Join>
[[gnu::always_inline]] inline float folded(DV d, V x, const Join& join) {
  if constexpr (hn::MaxLanes(DV()) == 1) {
    return hn::GetLane(x);
  } else {
    const hn::Half<DV> half;
    return folded(half, join(hn::LowerHalf(half, x), hn::UpperHalf(half, x)), join);
  }
}
template <class Join>
[[gnu::always_inline]] inline float folded(Floats x, const Join& join) {
  if constexpr (kPieces == 4) {
    x.part[0] = join(x.part[0], x.part[2]);
    x.part[1] = join(x.part[1], x.part[3]);
  }
  if constexpr (kPieces > 1) x.part[0] = join(x.part[0], x.part[1]);
  return folded(D(), x.part[0], join);
}
inline float reduce_sum(Floats x) { return folded(x, [](auto a, auto b) { return hn::Add(a, b); }); }
inline float reduce_max(Floats x) { return folded(x, [](auto a, auto b) { return hn::Max(a, b); }); }

inline Mask first_lanes(int64_t count) {
  return each_mask([&](auto i) {
    const int64_t left = count - i * kPerPiece;
    return hn::FirstN(D(), static_cast<size_t>(left < 0 ? 0 : left > kPerPiece ? kPerPiece : left));
  });
}
inline Mask less(Floats a, Floats b) {
  return each_mask([&](auto i) { return hn::Lt(a.part[i], b.part[i]); });
}
inline bool any_equal(Floats a, Floats b) {
  bool any = false;
  unrolled<kPieces>([&](auto i) { any |= !hn::AllFalse(D(), hn::Eq(a.part[i], b.part[i])); });
  return any;
}
inline bool all(Mask lanes) {
  bool all = true;
  unrolled<kPieces>([&](auto i) { all &= hn::AllTrue(D(), lanes.part[i]); });
  return all;
}
inline Floats blend(Mask mask, Floats yes, Floats no) {
  return each([&](auto i) { return hn::IfThenElse(mask.part[i], yes.part[i], no.part[i]); });
}
inline void masked_store(int32_t* to, Mask mask, int32_t number) {
  unrolled<kPieces>([&](auto i) {
    const auto here = hn::RebindMask(DInts(), mask.part[i]);
    hn::BlendedStore(hn::Set(DInts(), number), here, DInts(), to + i * kPerPiece);
  });
}
inline Mask nonzero(const uint8_t* from, int64_t count) {
  uint8_t bytes[kLanes] = {};
  if (count < kLanes) from = static_cast<const uint8_t*>(std::memcpy(bytes, from, count));
  const hn::Rebind<uint8_t, D> d;
  return each_mask([&](auto i) {
    const auto wide = hn::PromoteTo(DInts(), hn::LoadU(d, from + i * kPerPiece));
    return hn::RebindMask(D(), hn::Gt(wide, hn::Zero(DInts())));
  });
}
inline int compress(float* to, Mask mask, Floats x) {
  size_t count = 0;
  unrolled<kPieces>([&](auto i) {
    hn::StoreU(hn::Compress(x.part[i], mask.part[i]), D(), to + count);
    count += hn::CountTrue(D(), mask.part[i]);
  });
  return static_cast<int>(count);
}

inline Words words(const void* from) {
  Words out;
  unrolled<kPieces>([&](auto i) {
    out.part[i] = hn::LoadU(DWords(), static_cast<const uint32_t*>(from) + i * kPerPiece);
  });
  return out;
}
inline Words zero_words() {
  Words out;
  unrolled<kPieces>([&](auto i) { out.part[i] = hn::Zero(DWords()); });
  return out;
}

#if HWY_NATIVE_DOT_BF16
using DPairs = hn::Repartition<hwy::bfloat16_t, D>;
inline void as_inputs(const bf16* from, int64_t count, Input* to) {
  std::memcpy(to, from, count * sizeof(bf16));
}

template <int M, int V>
[[gnu::always_inline]] inline void add_products(const Input* x, int64_t stride, const uint8_t* panels,
                                                int64_t panel_stride, Floats (&sums)[M][V]) {
  Words weights[V];
  for (int v = 0; v < V; v++) weights[v] = words(panels + v * panel_stride);
  for (int m = 0; m < M; m++) {
    uint32_t both;
    std::memcpy(&both, x + m * stride, sizeof(both));
    const auto pair = hn::BitCast(DPairs(), hn::Set(DWords(), both));
    for (int v = 0; v < V; v++)
      unrolled<kPieces>([&](auto i) {
        Vec unused;
        Vec& sum = sums[m][v].part[i];
        const auto weight = hn::BitCast(DPairs(), weights[v].part[i]);
        sum = hn::ReorderWidenMulAccumulate(D(), pair, weight, sum, unused);
      });
  }
}
#else
inline void as_inputs(const bf16* from, int64_t count, Input* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; i++) to[i] = widened(from[i]);
}

template <int M, int V>
[[gnu::always_inline]] inline void add_products(const Input* x, int64_t stride, const uint8_t* panels,
                                                int64_t panel_stride, Floats (&sums)[M][V]) {
  unrolled<V>([&](auto v) {
    const uint8_t *panel = panels + v * panel_stride, *again = panel;
    const auto add = [&](const Input* from, const Floats& half) {
      unrolled<M>([&](auto m) {
        const Vec number = hn::Set(D(), from[m * stride]);
        unrolled<kPieces>([&](auto i) {
          sums[m][v].part[i] = hn::MulAdd(number, half.part[i], sums[m][v].part[i]);
        });
      });
    };
    asm("" : "+r"(again));  // else the compiler keeps both halves in registers
    const Words low = words(panel);
    add(x, each([&](auto i) { return hn::BitCast(D(), hn::ShiftLeft<16>(low.part[i])); }));
    const Words high = words(again);
    add(x + 1, each([&](auto i) {
          return hn::BitCast(D(), hn::And(high.part[i], hn::Set(DWords(), 0xffff0000u)));
        }));
  });
}
#endif

// Four bits.
using Register = Vec;
using DBytes = hn::Repartition<uint8_t, D>;
using DCodes = hn::Repartition<int8_t, D>;
using DShorts = hn::Repartition<int16_t, D>;
using Bytes = hn::Vec<DBytes>;
constexpr int kParts = 2 * kPieces;

inline Register multiply_add(Register a, Register b, Register c) { return hn::MulAdd(a, b, c); }
inline Register repeated(float number) { return hn::Set(D(), number); }
inline Register repeated(const float (&both)[2]) {
  uint64_t bits;
  std::memcpy(&bits, both, sizeof(bits));
  return hn::BitCast(D(), hn::Set(hn::Repartition<uint64_t, D>(), bits));
}
inline Bytes bytes(const uint8_t* from) { return hn::LoadU(DBytes(), from); }
inline Bytes low_nibbles(Bytes both) { return hn::And(both, hn::Set(DBytes(), 15)); }
inline Bytes high_nibbles(Bytes both) {
  const hn::Repartition<uint16_t, D> d;
  return low_nibbles(hn::BitCast(DBytes(), hn::ShiftRight<4>(hn::BitCast(d, both))));
}

[[gnu::always_inline]] inline Register dot_products(const Bytes (&codes)[4], const int8_t (&x)[4][8]) {
  const auto row = [&](int i) {
    int64_t both;
    std::memcpy(&both, x[i], sizeof(both));
    return hn::BitCast(DCodes(), hn::Set(hn::Repartition<int64_t, D>(), both));
  };
#if HWY_TARGET <= HWY_AVX3_DL
  auto sums = hn::Zero(DInts());
  unrolled<4>([&](auto i) { sums = hn::SumOfMulQuadAccumulate(DInts(), codes[i], row(i), sums); });
  return hn::ConvertTo(D(), sums);
#elif HWY_ARCH_ARM
  auto sums = hn::Zero(DInts());
  unrolled<4>([&](auto i) {
    sums = hn::SumOfMulQuadAccumulate(DInts(), hn::BitCast(DCodes(), codes[i]), row(i), sums);
  });
  return hn::ConvertTo(D(), sums);
#else
  auto products = hn::Zero(DShorts());
  unrolled<4>([&](auto i) {
    products = hn::Add(products, hn::SatWidenMulPairwiseAdd(DShorts(), codes[i], row(i)));
  });
  return hn::ConvertTo(D(), hn::WidenMulPairwiseAdd(DInts(), products, hn::Set(DShorts(), 1)));
#endif
}

inline void load_halves_twice(const uint8_t* from, Register (&to)[kParts]) {
  const hn::Rebind<hwy::float16_t, D> d;
  unrolled<kPieces>([&](auto i) {
    const auto* const numbers = reinterpret_cast<const hwy::float16_t*>(from) + i * kPerPiece;
    const Vec wide = hn::PromoteTo(D(), hn::LoadU(d, numbers));
    to[2 * i] = hn::InterleaveWholeLower(D(), wide, wide);
    to[2 * i + 1] = hn::InterleaveWholeUpper(D(), wide, wide);
  });
}
inline Floats add_lane_pairs(const Register (&parts)[kParts]) {
  return each([&](auto i) {
    const Vec low = parts[2 * i], high = parts[2 * i + 1];
    return hn::Add(hn::ConcatEven(D(), high, low), hn::ConcatOdd(D(), high, low));
  });
}
inline void store_int8(int8_t* to, Floats x) {
  const hn::Rebind<int8_t, D> d;
  const hn::Full128<uint8_t> bytes;
  alignas(16) int8_t nearest[kLanes];
  unrolled<kPieces>([&](auto i) {
    hn::StoreU(hn::DemoteTo(d, hn::NearestInt(x.part[i])), d, nearest + i * kPerPiece);
  });
  const auto in_order = hn::Load(bytes, reinterpret_cast<const uint8_t*>(nearest));
  hn::StoreU(hn::TableLookupBytes(in_order, hn::Load(bytes, kEvenPairsFirst)), bytes,
             reinterpret_cast<uint8_t*>(to));
}

// Rows of 16 words each become columns.
inline void transpose(Words rows[kLanes]) {
  using DDoubles = hn::Repartition<uint64_t, D>;
  const DWords d;
  using V = hn::Vec<DWords>;
  constexpr int kBlocks = kPerPiece / 4;
  V columns[kPieces][kLanes];  // of each piece's words
  unrolled<kPieces>([&](auto p) {
    V a[kLanes], b[kLanes];
    unrolled<kLanes / 2>([&](auto i) {
      a[2 * i] = hn::InterleaveLower(d, rows[2 * i].part[p], rows[2 * i + 1].part[p]);
      a[2 * i + 1] = hn::InterleaveUpper(d, rows[2 * i].part[p], rows[2 * i + 1].part[p]);
    });
    const auto wide = [](V x) { return hn::BitCast(DDoubles(), x); };
    unrolled<kLanes / 4>([&](auto i) {
      constexpr int k = 4 * i;
      b[k] = hn::BitCast(d, hn::InterleaveLower(DDoubles(), wide(a[k]), wide(a[k + 2])));
      b[k + 1] = hn::BitCast(d, hn::InterleaveUpper(DDoubles(), wide(a[k]), wide(a[k + 2])));
      b[k + 2] = hn::BitCast(d, hn::InterleaveLower(DDoubles(), wide(a[k + 1]), wide(a[k + 3])));
      b[k + 3] = hn::BitCast(d, hn::InterleaveUpper(DDoubles(), wide(a[k + 1]), wide(a[k + 3])));
    });
    // b[4 g + w] has word w of each block, of rows 4 g to 4 g + 3; a column has the blocks of all g.
    if constexpr (kBlocks == 1) {
      unrolled<kLanes>([&](auto i) { columns[p][i] = b[i]; });
    } else if constexpr (kBlocks == 2) {
      unrolled<4>([&](auto w) {
        unrolled<2>([&](auto g) {
          columns[p][8 * g + w] = hn::ConcatLowerLower(d, b[8 * g + 4 + w], b[8 * g + w]);
          columns[p][8 * g + 4 + w] = hn::ConcatUpperUpper(d, b[8 * g + 4 + w], b[8 * g + w]);
        });
      });
    } else {
#if HWY_MAX_BYTES == 64
      unrolled<4>([&](auto w) {
        const V even0 = hn::InterleaveEvenBlocks(d, b[w], b[4 + w]);
        const V even1 = hn::InterleaveEvenBlocks(d, b[8 + w], b[12 + w]);
        const V odd0 = hn::InterleaveOddBlocks(d, b[w], b[4 + w]);
        const V odd1 = hn::InterleaveOddBlocks(d, b[8 + w], b[12 + w]);
        columns[p][w] = hn::ConcatLowerLower(d, even1, even0);
        columns[p][8 + w] = hn::ConcatUpperUpper(d, even1, even0);
        columns[p][4 + w] = hn::ConcatLowerLower(d, odd1, odd0);
        columns[p][12 + w] = hn::ConcatUpperUpper(d, odd1, odd0);
      });
#endif
    }
  });
  // With several pieces, columns[p][rows' group * kPerPiece + c] has word c of piece p.
  unrolled<kLanes>([&](auto column) {
    constexpr int p = column / kPerPiece, c = column % kPerPiece;
    unrolled<kPieces>([&](auto i) { rows[column].part[i] = columns[p][i * kPerPiece + c]; });
  });
}

}  // namespace
