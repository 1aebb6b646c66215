// Registers, and products of a few rows with weights in panels.
//
// Legend: M rows, I inputs, O outputs, H query heads, J KV heads, G = H / J, D head dim, T tokens,
// S slots. A pair is two neighbouring bf16 numbers, which one instruction multiplies and adds. A
// panel is 16 outputs of a weight, laid out as (I / 2, 16, 2).
//
// A panel of four bits is a row of blocks, each of 32 inputs: 16 scales and 16 zeros in float16, one
// of each for an output, then 4 * 32 words. The words have the order of a pair's 16 * 2 numbers, and
// word w of the j-th 32 has the codes of pairs 4 j to 4 j + 3 in its four nibbles, the lowest first.
// A weight is scale * code + zero.

#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

using bf16 = uint16_t;

constexpr int kLanes = 16;        // float32 numbers of a register; outputs of a panel
constexpr int kPanels = 4;        // panels that a tile computes together
constexpr int kTileRows = 6;      // rows of a tile: 6 * 4 sums, 4 weights and a row fit 32 registers
constexpr int kAhead = 32;        // pairs that weights are fetched ahead of their use
constexpr int kBlock = 32;        // inputs that share a scale and a zero
constexpr int kBlocksAhead = 4;   // the same in blocks
constexpr int kBlockBytes = 2 * kLanes * 2 + kBlock * kLanes / 2;
constexpr int kChunkRows = 192;   // rows of a layer at once; bounds scratch memory
constexpr int kQueries = 8;       // queries that share what is read of keys and values

}  // namespace

extern "C" {

// A linear layer's weight in panels. Outputs that fill the last panel have zero weights.
struct Matrix {
  const void* panels;
  const float* bias;  // or null
  int64_t inputs;
  int64_t outputs;
  int64_t bits;  // of a weight: 16 or 4
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

// M rows times V panels; `give(row, panel, sums)` takes each 16 outputs.
template <int M, int V, class Give>
inline void tile(const bf16* x, int64_t stride, const bf16* panels, int64_t panel_size,
                 const bf16* next, int64_t pairs, const Give& give) {
  __m512 sums[M][V];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) sums[m][v] = _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; k++) {
    const bf16* later = k + kAhead < pairs ? panels + (k + kAhead) * 2 * kLanes
                                           : next + (k + kAhead - pairs) * 2 * kLanes;
    __m512bh weights[V];
    for (int v = 0; v < V; v++) {
      weights[v] = (__m512bh)_mm512_loadu_si512(panels + v * panel_size + k * 2 * kLanes);
      _mm_prefetch(reinterpret_cast<const char*>(later + v * panel_size), _MM_HINT_T0);
    }
    for (int m = 0; m < M; m++) {
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair(x + m * stride + 2 * k));
      for (int v = 0; v < V; v++) sums[m][v] = _mm512_dpbf16_ps(sums[m][v], both, weights[v]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) give(m, v, sums[m][v]);
}

// The same for panels of four bits.
template <int M, int V, class Give>
inline void tile(const bf16* x, int64_t stride, const uint8_t* panels, int64_t panel_size,
                 const uint8_t* next, int64_t pairs, const Give& give) {
  // bf16 0 to 15, twice: a look-up takes five bits, of which the highest is the next code's.
  alignas(64) static const bf16 kCodes[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
      0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
      0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
  const __m512i codes = _mm512_load_si512(kCodes);
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  const int64_t blocks = pairs * 2 / kBlock;
  __m512 sums[M][V];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) sums[m][v] = _mm512_setzero_ps();
  for (int64_t b = 0; b < blocks; b++) {
    const uint8_t* later = b + kBlocksAhead < blocks ? panels + (b + kBlocksAhead) * kBlockBytes
                                          : next + (b + kBlocksAhead - blocks) * kBlockBytes;
    for (int v = 0; v < V; v++)
      for (int line = 0; line < kBlockBytes; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(later + v * panel_size + line), _MM_HINT_T0);
    const bf16* from = x + b * kBlock;
    __m512 inner[M][V];
    for (int m = 0; m < M; m++)
      for (int v = 0; v < V; v++) inner[m][v] = _mm512_setzero_ps();
    for (int j = 0; j < 4; j++) {
      __m512i words[V];
      for (int v = 0; v < V; v++)
        words[v] = _mm512_loadu_si512(panels + v * panel_size + b * kBlockBytes + 64 * (j + 1));
      for (int k = 0; k < 4; k++) {
        __m512bh weights[V];
        for (int v = 0; v < V; v++) {
          weights[v] = (__m512bh)_mm512_permutexvar_epi16(words[v], codes);
          words[v] = _mm512_srli_epi16(words[v], 4);
        }
        for (int m = 0; m < M; m++) {
          const __m512bh both =
              (__m512bh)_mm512_set1_epi32(pair(from + m * stride + 8 * j + 2 * k));
          for (int v = 0; v < V; v++) inner[m][v] = _mm512_dpbf16_ps(inner[m][v], both, weights[v]);
        }
      }
    }
    for (int m = 0; m < M; m++) {
      // All of a row's 32 inputs, 16 sums of two, which every output adds times its zero.
      const __m512 twos = _mm512_dpbf16_ps(
          _mm512_setzero_ps(), (__m512bh)_mm512_loadu_si512(from + m * stride), ones);
      const __m512 all = _mm512_set1_ps(_mm512_reduce_add_ps(twos));
      for (int v = 0; v < V; v++) {
        const uint8_t* block = panels + v * panel_size + b * kBlockBytes;
        const __m512 scale =
            _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block)));
        const __m512 zero =
            _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 32)));
        sums[m][v] = _mm512_fmadd_ps(inner[m][v], scale, sums[m][v]);
        sums[m][v] = _mm512_fmadd_ps(all, zero, sums[m][v]);
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) give(m, v, sums[m][v]);
}

template <int M, class... Rest>
inline void tile_of(int panels_at_once, Rest&&... rest) {
  switch (panels_at_once) {
    case 4: return tile<M, 4>(rest...);
    case 3: return tile<M, 3>(rest...);
    case 2: return tile<M, 2>(rest...);
    default: return tile<M, 1>(rest...);
  }
}

// This thread's share of x times the transposed weight, of panels of one kind.
template <class Panel, class Give>
void multiply(const Matrix& matrix, int64_t panel_size, int64_t at_once, const bf16* x,
              int64_t rows, int64_t stride, const Give& give) {
  const Panel* const all = static_cast<const Panel*>(matrix.panels);
  const int64_t pairs = matrix.inputs / 2;
  const Share share((matrix.outputs + kLanes - 1) / kLanes);
  for (int64_t panel = share.start; panel < share.stop; panel += at_once) {
    const int count = static_cast<int>(std::min<int64_t>(at_once, share.stop - panel));
    const Panel* panels = all + panel * panel_size;
    const Panel* following = panel + count < share.stop ? panels + count * panel_size : panels;
    for (int64_t row = 0; row < rows;) {
      const int64_t left = rows - row;
      const int64_t size = left == 7 || left == 8 ? 4 : std::min<int64_t>(kTileRows, left);
      const Panel* next = left > size ? panels : following;
      const auto take = [&](int m, int v, __m512 sums) {
        const int64_t output = (panel + v) * kLanes;
        if (matrix.bias) sums = _mm512_add_ps(sums, _mm512_loadu_ps(matrix.bias + output));
        give(row + m, output, sums);
      };
      const bf16* from = x + row * stride;
      switch (size) {
        case 6: tile_of<6>(count, from, stride, panels, panel_size, next, pairs, take); break;
        case 5: tile_of<5>(count, from, stride, panels, panel_size, next, pairs, take); break;
        case 4: tile_of<4>(count, from, stride, panels, panel_size, next, pairs, take); break;
        case 3: tile_of<3>(count, from, stride, panels, panel_size, next, pairs, take); break;
        case 2: tile_of<2>(count, from, stride, panels, panel_size, next, pairs, take); break;
        default: tile_of<1>(count, from, stride, panels, panel_size, next, pairs, take);
      }
      row += size;
    }
  }
}

// This thread's share of x times the transposed weight: `give(row, first output, sums)`.
template <class Give>
void multiply(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride, const Give& give) {
  if (matrix.bits == 4)
    multiply<uint8_t>(matrix, matrix.inputs / kBlock * kBlockBytes, 2, x, rows, stride, give);
  else
    multiply<bf16>(matrix, matrix.inputs * kLanes, kPanels, x, rows, stride, give);
}

}  // namespace
