// Products of a few rows with weights in panels.
//
// Legend: M rows, I inputs, O outputs, H query heads, J KV heads, G = H / J, D head dim, T tokens,
// S slots.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>
#include <vector>

#include "w4a8.h"
#ifdef __AVX512BF16__
#include "quantized_blocks.h"
#endif
#ifdef __AMX_BF16__
#include "amx_gemm.h"
#endif

namespace {

constexpr int64_t kChunkRows = 192;    // rows of a layer at once; bounds scratch memory
constexpr int64_t kEncodedTokens = 16; // tokens that are encoded at once; bounds scratch memory

}  // namespace

extern "C" {

// A linear layer's weight in panels. Outputs that fill the last panel have zero weights.
struct Matrix {
  const void* panels;
  const float* bias;  // or null
  int64_t inputs;
  int64_t outputs;
  int64_t bits;     // of a weight: 16, 8 or 4
  int64_t rounded;  // 1: what it is multiplied with may be rounded, too; of four bits
};

}  // extern "C"

namespace {

// Memory of a calling thread that its calls share one after another.
class Scratch {
 public:
  float* floats(int which, size_t count) { return grown(floats_[which], count); }
  bf16* halves(size_t count) { return grown(halves_, count); }

 private:
  template <class Number>
  static Number* grown(std::vector<Number>& numbers, size_t count) {
    if (numbers.size() < count) numbers.resize(count);
    return numbers.data();
  }
  std::vector<float> floats_[2];
  std::vector<bf16> halves_;
};

thread_local Scratch scratch;

// A worker's own memory, inside a parallel region: one piece for each `Use`.
template <class Use, class Number>
Number* own(size_t count) {
  thread_local std::vector<Number> room;
  if (room.size() < count) room.resize(count);
  return room.data();
}

template <class Format, int M, class... Rest>
inline void tile_of(int count, Rest&... rest) {
  if constexpr (M <= Format::kMostRows) {
    constexpr int most = Format::most_panels(M);
    if constexpr (most >= 4)
      if (count == 4) return Format::template tile<M, 4>(rest...);
    if constexpr (most >= 3)
      if (count == 3) return Format::template tile<M, 3>(rest...);
    if constexpr (most >= 2)
      if (count == 2) return Format::template tile<M, 2>(rest...);
    return Format::template tile<M, 1>(rest...);
  }
}

// Rows times `count` panels, `apart` bytes apart: `give(row, v, sums)`. After each of them `following` is
// read, as far from the next one's.
template <class Format, class Give>
void multiply_panels(const typename Format::Input* x, int64_t rows, int64_t stride,
                     const uint8_t* panels, int count, int64_t apart, const uint8_t* following,
                     int64_t inputs, const Give& give) {
  for (int64_t row = 0; row < rows;) {
    // Tiles of nearly one size: a small one reads its weights for little.
    const int64_t left = rows - row, tiles = (left + Format::kMostRows - 1) / Format::kMostRows;
    const int64_t size = (left + tiles - 1) / tiles;
    const uint8_t* next = left > size ? panels : following;
    const typename Format::Input* from = x + row * stride;
    Tile tile;
    switch (size) {
      case 8: tile_of<Format, 8>(count, from, stride, panels, apart, next, inputs, tile); break;
      case 7: tile_of<Format, 7>(count, from, stride, panels, apart, next, inputs, tile); break;
      case 6: tile_of<Format, 6>(count, from, stride, panels, apart, next, inputs, tile); break;
      case 5: tile_of<Format, 5>(count, from, stride, panels, apart, next, inputs, tile); break;
      case 4: tile_of<Format, 4>(count, from, stride, panels, apart, next, inputs, tile); break;
      case 3: tile_of<Format, 3>(count, from, stride, panels, apart, next, inputs, tile); break;
      case 2: tile_of<Format, 2>(count, from, stride, panels, apart, next, inputs, tile); break;
      default: tile_of<Format, 1>(count, from, stride, panels, apart, next, inputs, tile);
    }
    for (int64_t m = 0; m < size; m++)
      for (int v = 0; v < count; v++) give(row + m, v, tile.sums[m][v]);
    row += size;
  }
}

#ifdef __AMX_BF16__
// Whether tiles multiply this number of inputs with weights of a format.
template <class Format>
constexpr bool tiled(int64_t inputs) {
  return std::is_same_v<Format, Outputs> ||
         (std::is_same_v<typename Format::Input, bf16> && inputs % kBlock == 0);
}
#endif

// As `multiply_panels`, by the fastest instructions.
template <class Format, class Give>
void multiply_any(const typename Format::Input* x, int64_t rows, int64_t stride, const uint8_t* panels,
                  int count, int64_t apart, const uint8_t* next, int64_t inputs, const Give& give) {
#ifdef __AMX_BF16__
  if constexpr (std::is_same_v<Format, Outputs>)
    return multiply_by_outputs(x, rows, panels, count, apart, next, inputs, give);
  else if constexpr (std::is_same_v<typename Format::Input, bf16>)
    if (Format::kUnpacks || tiled<Format>(inputs))  // blocks are of as many inputs as tiles
      return multiply_rows<Format>(x, rows, stride, panels, count, apart, next, inputs, give);
  if constexpr (!std::is_same_v<Format, Outputs> && !Format::kUnpacks)
#endif
    multiply_panels<Format>(x, rows, stride, panels, count, apart, next, inputs, give);
}

// From `start` on, up to but without `stop`.
struct Stretch { int64_t start, stop; };

// The calling thread's share of `parts` equal parts.
inline Stretch share_of(int64_t parts) {
  const int64_t mine = omp_get_thread_num(), all = omp_get_num_threads();
  return {parts * mine / all, parts * (mine + 1) / all};
}

// Rows times a stretch of panels: `give(row, panel, sums)`.
template <class Format, class Give>
void multiply_stretch(const Matrix& matrix, const typename Format::Input* x, int64_t rows,
                      int64_t stride, Stretch stretch, const Give& give) {
  const int64_t inputs = matrix.inputs, bytes = Format::panel_bytes(inputs);
  int64_t streams = Format::panels_at_once(rows);
#ifdef __AMX_BF16__
  std::optional<Tiles> tiles;
  if constexpr (std::is_same_v<Format, Outputs>) {
    tiles.emplace(RowTiles(rows).size, Outputs::first_rows(rows));
  } else if (tiled<Format>(inputs)) {
    tiles.emplace(RowTiles(rows).size);
    streams = tiled_panels(rows);
  }
#endif
  const auto at = [&](int64_t panel) { return static_cast<const uint8_t*>(matrix.panels) + panel * bytes; };
  const auto take = [&](int64_t first, int64_t count, int64_t apart, int64_t next) {
    const int num = static_cast<int>(count);
    const auto pass = [&](int64_t row, int v, Floats sums) {
      const int64_t panel = first + v * apart;
      if (matrix.bias) sums = sums + load(matrix.bias + panel * kLanes);
      give(row, panel, sums);
    };
#ifdef __AVX512BF16__
    if constexpr (Format::kUnpacks)
      if (rows > kUnpackedRows) {  // once for all these rows
        const int64_t size = Sixteen::panel_bytes(inputs);
        uint8_t* const room = own<Format, uint8_t>(count * size);
        for (int v = 0; v < num; v++)
          Format::unpack(at(first + v * apart), inputs, reinterpret_cast<bf16*>(room + v * size));
        return multiply_any<Sixteen>(x, rows, stride, room, num, size, room, inputs, pass);
      }
#endif
    multiply_any<Format>(x, rows, stride, at(first), num, apart * bytes, at(next), inputs, pass);
  };
  // Panels that are multiplied together are far apart: each is a stream of its own from memory, and a
  // CPU fetches several long ones ahead faster than one.
  const int64_t length = (stretch.stop - stretch.start) / streams;
  const int64_t behind = stretch.start + streams * length;
  for (int64_t i = 0; i < length; i++) {
    const int64_t panel = stretch.start + i;
    take(panel, streams, length, i + 1 < length ? panel + 1 : panel);
  }
  if (behind < stretch.stop) take(behind, stretch.stop - behind, 1, behind);
}

// Rows as a format wants them, in a worker's own memory.
template <class Format>
const typename Format::Input* converted(const Matrix& matrix, const bf16* x, int64_t rows,
                                        int64_t stride) {
  using Input = typename Format::Input;
  const int64_t width = matrix.inputs / Format::kInputs;
  Input* const to = own<Format, Input>(rows * width);
  for (int64_t row = 0; row < rows; row++) as_inputs(x + row * stride, matrix.inputs, to + row * width);
  return to;
}

#ifdef __AMX_BF16__
// Rows in the pairs that `Outputs` read.
inline const uint32_t* paired(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride) {
  const RowTiles tiles(rows);
  uint32_t* const to = own<Outputs, uint32_t>(tiles.count * tiles.size * matrix.inputs / 2);
  as_pairs(x, tiles, stride, matrix.inputs, to);
  return to;
}
#endif

// `use(format, inputs, their stride)`, by how a matrix is kept.
template <class Use>
void with_format(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride, const Use& use) {
  if (matrix.rounded)
    return use(Nibbles(), converted<Nibbles>(matrix, x, rows, stride), matrix.inputs / Nibbles::kInputs);
#ifdef __AMX_BF16__
  if (matrix.bits == 4) return use(Outputs(), paired(matrix, x, rows, stride), 0);
#elif defined(__AVX512BF16__)
  if (matrix.bits == 4) return use(Blocks<FourBits>(), x, stride);
#endif
#ifdef __AVX512BF16__
  if (matrix.bits == 8) return use(Blocks<EightBits>(), x, stride);
  use(Sixteen(), x, stride);
#else
  use(Sixteen(), converted<Sixteen>(matrix, x, rows, stride), matrix.inputs);
#endif
}

// This thread's share of x times the transposed weight: `give(row, first output, sums)`.
template <class Give>
void multiply(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride, const Give& give) {
  const Stretch mine = share_of((matrix.outputs + kLanes - 1) / kLanes);
  for (int64_t start = 0; start < rows; start += kChunkRows) {
    const int64_t count = std::min(kChunkRows, rows - start);
    with_format(matrix, x + start * stride, count, stride, [&](auto format, auto* inputs, int64_t width) {
      const auto take = [&](int64_t row, int64_t panel, Floats sums) {
        give(start + row, panel * kLanes, sums);
      };
      multiply_stretch<decltype(format)>(matrix, inputs, count, width, mine, take);
    });
  }
}

}  // namespace
