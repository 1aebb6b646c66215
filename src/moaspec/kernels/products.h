// Registers, and products of a few rows with weights in panels.
//
// Legend: M rows, I inputs, O outputs, H query heads, J KV heads, G = H / J, D head dim, T tokens,
// S slots. A pair is two neighbouring bf16 numbers, which one instruction multiplies and adds. A
// panel is 16 outputs of a weight, laid out as (I / 2, 16, 2).
//
// A panel of fewer bits is a row of blocks of 32 inputs. A block of four bits has 16 scales and 16 zeros
// in float16, one of each for an output, then four times 16 words: for pairs 0 to 7 and 8 to 15, of outputs
// 0 to 7 and 8 to 15. A word's lane is an output and a half of the pair; its eight nibbles are the codes of
// eight pairs, the lowest first. A weight is scale * code + zero, rounded to bf16. A block of eight bits has
// 16 scales, then the signed codes in the order of a panel of bf16; a weight is scale * code, rounded.

#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace {

using bf16 = uint16_t;

constexpr int kLanes = 16;        // float32 numbers of a register; outputs of a panel
constexpr int kTileRows = 8;      // rows of a tile, at most
constexpr int kUnpackedRows = 16; // rows above which blocks are unpacked first
constexpr int kAhead = 32;        // pairs that weights are fetched ahead of their use
constexpr int kBlock = 32;        // inputs that share a scale and a zero
constexpr int kBlocksAhead = 4;   // blocks that weights are fetched ahead of their use
constexpr int kChunkRows = 192;   // rows of a layer at once; bounds scratch memory
constexpr int64_t kEncodedTokens = 64; // tokens that are encoded at once; bounds scratch memory
constexpr int kQueries = 8;       // queries that share what is read of keys and values

}  // namespace

extern "C" {

// A linear layer's weight in panels. Outputs that fill the last panel have zero weights.
struct Matrix {
  const void* panels;
  const float* bias;  // or null
  int64_t inputs;
  int64_t outputs;
  int64_t bits;  // of a weight: 16, 8 or 4
};

}  // extern "C"

namespace {

// Scratch memory of a calling thread, which its calls share one after another.
struct Scratch {
  std::vector<float> numbers[3];
  std::vector<bf16> halves;

  float* floats(int which, size_t count) {
    if (numbers[which].size() < count) numbers[which].resize(count);
    return numbers[which].data();
  }
  bf16* bf16s(size_t count) {
    if (halves.size() < count) halves.resize(count);
    return halves.data();
  }
};

thread_local Scratch scratch;
thread_local std::vector<float> own_scratch;  // of a worker, inside a parallel region

inline __m512 widened(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline __m512 load(const bf16* from) {
  return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline void store(bf16* to, __m512 numbers) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(numbers));
}

inline float widened(bf16 half) {
  union { uint32_t bits; float number; } cast = {static_cast<uint32_t>(half) << 16};
  return cast.number;
}

inline bf16 rounded(float number) {
  return static_cast<bf16>(
      _mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(number)), 0));
}

inline __mmask16 first(int64_t count) {
  return count >= kLanes ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
}

inline uint32_t pair(const bf16* from) {
  uint32_t both;
  __builtin_memcpy(&both, from, sizeof(both));
  return both;
}

// e to the power of numbers that are at most 0, to float32's precision.
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  // Taylor's series: |r| is at most ln(2) / 2, so the first term left out is below 1e-8.
  __m512 sum = _mm512_set1_ps(1.0f / 5040);
  for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(term));
  return _mm512_scalef_ps(sum, n);
}

// x * sigmoid(x), by the exponential of what is at most zero.
inline __m512 silu(__m512 x) {
  const __m512 zero = _mm512_setzero_ps(), one = _mm512_set1_ps(1.0f);
  const __m512 small = exponential(_mm512_sub_ps(zero, _mm512_abs_ps(x)));
  const __m512 top = _mm512_mask_mov_ps(one, _mm512_cmp_ps_mask(x, zero, _CMP_LT_OQ), small);
  return _mm512_mul_ps(x, _mm512_div_ps(top, _mm512_add_ps(one, small)));
}

// What belongs to one thread of a team, of so many equal parts.
struct Share {
  int64_t start, stop;
  explicit Share(int64_t parts) {
    const int64_t own = omp_get_thread_num(), all = omp_get_num_threads();
    start = parts * own / all;
    stop = parts * (own + 1) / all;
  }
};

// Sums of 16 outputs each. Written by one of few functions, whatever is done with them.
struct Tile {
  __m512 sums[kTileRows][4];
};

// Weights as they are, 16 bits each.
struct Sixteen {
  static constexpr int kMostRows = 6;  // of a tile: 6 * 4 sums, 4 weights and a row fit 32 registers
  static int64_t panels_at_once(int64_t) { return 4; }
  static int64_t panel_bytes(int64_t inputs) { return inputs * kLanes * sizeof(bf16); }

  // M rows times V panels.
  template <int M, int V>
  static void tile(const bf16* x, int64_t stride, const uint8_t* panels, int64_t panel_size,
                   const uint8_t* next, int64_t inputs, Tile& out) {
    constexpr int64_t kPair = 2 * kLanes * sizeof(bf16);
    const int64_t pairs = inputs / 2;
    __m512 sums[M][V];
    for (int m = 0; m < M; m++)
      for (int v = 0; v < V; v++) sums[m][v] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++) {
      const uint8_t* later = k + kAhead < pairs ? panels + (k + kAhead) * kPair
                                                : next + (k + kAhead - pairs) * kPair;
      __m512bh weights[V];
      for (int v = 0; v < V; v++) {
        weights[v] = (__m512bh)_mm512_loadu_si512(panels + v * panel_size + k * kPair);
        _mm_prefetch(reinterpret_cast<const char*>(later + v * panel_size), _MM_HINT_T0);
      }
      for (int m = 0; m < M; m++) {
        const __m512bh both = (__m512bh)_mm512_set1_epi32(pair(x + m * stride + 2 * k));
        for (int v = 0; v < V; v++) sums[m][v] = _mm512_dpbf16_ps(sums[m][v], both, weights[v]);
      }
    }
    for (int m = 0; m < M; m++)
      for (int v = 0; v < V; v++) out.sums[m][v] = sums[m][v];
  }
};

// One number for each of 16 outputs, twice, as the lanes of outputs 0 to 7 and 8 to 15 want it.
inline void spread(const uint8_t* halves, __m512 to[2]) {
  const __m512 all = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
  const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  to[0] = _mm512_permutexvar_ps(twice, all);
  to[1] = _mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(8)), all);
}

// A block of four bits, unpacked pair by pair in their order.
class FourBits {
 public:
  static constexpr int kBytes = 4 * kLanes + kBlock * kLanes / 2;

  explicit FourBits(const uint8_t* block) : words_(block + 4 * kLanes) {
    spread(block, scale_);
    spread(block + 2 * kLanes, zero_);
  }
  __m512bh pair(int k) {
    __m512 weights[2];
    for (int half = 0; half < 2; half++) {
      if (k % 8 == 0) codes_[half] = _mm512_loadu_si512(words_ + (k / 8 * 2 + half) * 64);
      const __m512i lowest = _mm512_and_si512(codes_[half], _mm512_set1_epi32(15));
      weights[half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(lowest), scale_[half], zero_[half]);
      codes_[half] = _mm512_srli_epi32(codes_[half], 4);
    }
    return _mm512_cvtne2ps_pbh(weights[1], weights[0]);
  }

 private:
  __m512 scale_[2], zero_[2];
  __m512i codes_[2];
  const uint8_t* words_;
};

// The same in eight bits.
class EightBits {
 public:
  static constexpr int kBytes = 2 * kLanes + kBlock * kLanes;

  explicit EightBits(const uint8_t* block) : codes_(block + 2 * kLanes) { spread(block, scale_); }
  __m512bh pair(int k) {
    __m512 weights[2];
    for (int half = 0; half < 2; half++) {
      const uint8_t* from = codes_ + (2 * k + half) * kLanes;
      const __m512i codes =
          _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      weights[half] = _mm512_mul_ps(_mm512_cvtepi32_ps(codes), scale_[half]);
    }
    return _mm512_cvtne2ps_pbh(weights[1], weights[0]);
  }

 private:
  __m512 scale_[2];
  const uint8_t* codes_;
};

// Weights in blocks of fewer bits, of which each product has the same bits as of the 16 they stand for.
template <class Block>
struct Blocks {
  static constexpr int kMostRows = 8;
  static int64_t panels_at_once(int64_t rows) { return rows <= 6 ? 2 : 1; }
  static int64_t panel_bytes(int64_t inputs) { return inputs / kBlock * Block::kBytes; }

  template <int M, int V>
  static void tile(const bf16* x, int64_t stride, const uint8_t* panels, int64_t panel_size,
                   const uint8_t* next, int64_t inputs, Tile& out) {
    const int64_t blocks = inputs / kBlock;
    __m512 sums[M][V];
    for (int m = 0; m < M; m++)
      for (int v = 0; v < V; v++) sums[m][v] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
      const uint8_t* later = b + kBlocksAhead < blocks
                                 ? panels + (b + kBlocksAhead) * Block::kBytes
                                 : next + (b + kBlocksAhead - blocks) * Block::kBytes;
      for (int v = 0; v < V; v++)
        for (int line = 0; line < Block::kBytes; line += 64)
          _mm_prefetch(reinterpret_cast<const char*>(later + v * panel_size + line), _MM_HINT_T0);
      add<M, V>(x + b * kBlock, stride, panels + b * Block::kBytes, panel_size, sums);
    }
    for (int m = 0; m < M; m++)
      for (int v = 0; v < V; v++) out.sums[m][v] = sums[m][v];
  }

  // A panel in 16 bits.
  static void unpack(const uint8_t* panel, int64_t inputs, bf16* to) {
    for (int64_t b = 0; b < inputs / kBlock; b++) {
      Block block(panel + b * Block::kBytes);
      for (int k = 0; k < kBlock / 2; k++)
        _mm512_storeu_si512(to + (b * kBlock + 2 * k) * kLanes, (__m512i)block.pair(k));
    }
  }

 private:
  template <int M, int V>
  static void add(const bf16* x, int64_t stride, const uint8_t* first, int64_t panel_size,
                  __m512 (&sums)[M][V]) {
    Block low(first), high(first + (V - 1) * panel_size);
#pragma GCC unroll 16
    for (int k = 0; k < kBlock / 2; k++) {
      __m512bh weights[2] = {low.pair(k)};
      if (V == 2) weights[1] = high.pair(k);
      for (int m = 0; m < M; m++) {
        const __m512bh both = (__m512bh)_mm512_set1_epi32(pair(x + m * stride + 2 * k));
        for (int v = 0; v < V; v++) sums[m][v] = _mm512_dpbf16_ps(sums[m][v], both, weights[v]);
      }
    }
  }
};

template <class Format, int M, class... Rest>
inline void tile_of(int count, Rest&... rest) {
  if constexpr (M <= Format::kMostRows) {
    if constexpr (std::is_same_v<Format, Sixteen>) {
      if (count == 4) return Format::template tile<M, 4>(rest...);
      if (count == 3) return Format::template tile<M, 3>(rest...);
    }
    if constexpr (M <= 6)
      if (count == 2) return Format::template tile<M, 2>(rest...);
    return Format::template tile<M, 1>(rest...);
  }
}

// Rows times `count` panels: `give(row, panel, sums)`. After them `following` is read.
template <class Format, class Give>
void multiply_panels(const bf16* x, int64_t rows, int64_t stride, const uint8_t* panels, int count,
                     const uint8_t* following, int64_t inputs, const Give& give) {
  const int64_t bytes = Format::panel_bytes(inputs);
  for (int64_t row = 0; row < rows;) {
    // Tiles of nearly one size: a small one reads its weights for little.
    const int64_t left = rows - row, tiles = (left + Format::kMostRows - 1) / Format::kMostRows;
    const int64_t size = (left + tiles - 1) / tiles;
    const uint8_t* next = left > size ? panels : following;
    const bf16* from = x + row * stride;
    Tile tile;
    switch (size) {
      case 8: tile_of<Format, 8>(count, from, stride, panels, bytes, next, inputs, tile); break;
      case 7: tile_of<Format, 7>(count, from, stride, panels, bytes, next, inputs, tile); break;
      case 6: tile_of<Format, 6>(count, from, stride, panels, bytes, next, inputs, tile); break;
      case 5: tile_of<Format, 5>(count, from, stride, panels, bytes, next, inputs, tile); break;
      case 4: tile_of<Format, 4>(count, from, stride, panels, bytes, next, inputs, tile); break;
      case 3: tile_of<Format, 3>(count, from, stride, panels, bytes, next, inputs, tile); break;
      case 2: tile_of<Format, 2>(count, from, stride, panels, bytes, next, inputs, tile); break;
      default: tile_of<Format, 1>(count, from, stride, panels, bytes, next, inputs, tile);
    }
    for (int64_t m = 0; m < size; m++)
      for (int v = 0; v < count; v++) give(row + m, v, tile.sums[m][v]);
    row += size;
  }
}

// This thread's share of panels of one format: `visit(first panel, how many, the first, the next)`.
template <class Format, class Visit>
void share_panels(const Matrix& matrix, int64_t at_once, const Visit& visit) {
  const int64_t bytes = Format::panel_bytes(matrix.inputs);
  const uint8_t* const all = static_cast<const uint8_t*>(matrix.panels);
  const Share share((matrix.outputs + kLanes - 1) / kLanes);
  for (int64_t panel = share.start; panel < share.stop; panel += at_once) {
    const int count = static_cast<int>(std::min<int64_t>(at_once, share.stop - panel));
    const uint8_t* panels = all + panel * bytes;
    visit(panel, count, panels, panel + count < share.stop ? panels + count * bytes : panels);
  }
}

template <class Format, class Give>
void multiply_as(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride,
                 const Give& give) {
  share_panels<Format>(
      matrix, Format::panels_at_once(rows),
      [&](int64_t panel, int count, const uint8_t* panels, const uint8_t* following) {
        multiply_panels<Format>(x, rows, stride, panels, count, following, matrix.inputs,
                                [&](int64_t row, int v, __m512 sums) { give(row, panel + v, sums); });
      });
}

// For many rows, panels of blocks are unpacked first, once for all of them.
template <class Block, class Give>
void multiply_blocks(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride,
                     const Give& give) {
  if (rows <= kUnpackedRows) return multiply_as<Blocks<Block>>(matrix, x, rows, stride, give);
  const int64_t inputs = matrix.inputs, bytes = Blocks<Block>::panel_bytes(inputs);
  const int64_t unpacked = Sixteen::panel_bytes(inputs), at_once = Sixteen::panels_at_once(rows);
  own_scratch.resize(std::max<size_t>(own_scratch.size(), at_once * unpacked / sizeof(float)));
  uint8_t* const room = reinterpret_cast<uint8_t*>(own_scratch.data());
  share_panels<Blocks<Block>>(
      matrix, at_once, [&](int64_t panel, int count, const uint8_t* panels, const uint8_t*) {
        for (int v = 0; v < count; v++)
          Blocks<Block>::unpack(panels + v * bytes, inputs,
                                reinterpret_cast<bf16*>(room + v * unpacked));
        multiply_panels<Sixteen>(x, rows, stride, room, count, room, inputs,
                                 [&](int64_t row, int v, __m512 sums) { give(row, panel + v, sums); });
      });
}

// This thread's share of x times the transposed weight: `give(row, first output, sums)`.
template <class Give>
void multiply(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride, const Give& give) {
  const auto take = [&](int64_t row, int64_t panel, __m512 sums) {
    const int64_t output = panel * kLanes;
    if (matrix.bias) sums = _mm512_add_ps(sums, _mm512_loadu_ps(matrix.bias + output));
    give(row, output, sums);
  };
  switch (matrix.bits) {
    case 4: return multiply_blocks<FourBits>(matrix, x, rows, stride, take);
    case 8: return multiply_blocks<EightBits>(matrix, x, rows, stride, take);
    default: return multiply_as<Sixteen>(matrix, x, rows, stride, take);
  }
}

}  // namespace
