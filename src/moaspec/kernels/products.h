// Products of a few rows with weights in panels.
//
// Legend: M rows, I inputs, O outputs, H query heads, J KV heads, G = H / J, D head dim, T tokens,
// S slots.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "panels.h"
#ifdef __AVX512BF16__
#include "blocks.h"
#else
#include "nibbles.h"
#endif

namespace {

constexpr int64_t kChunkRows = 192;    // rows of a layer at once; bounds scratch memory
constexpr int64_t kEncodedTokens = 64; // tokens that are encoded at once; bounds scratch memory

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

// What belongs to one thread of a team, of so many equal parts.
struct Share {
  int64_t start, stop;
  explicit Share(int64_t parts) {
    const int64_t own = omp_get_thread_num(), all = omp_get_num_threads();
    start = parts * own / all;
    stop = parts * (own + 1) / all;
  }
};

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

// Rows times `count` panels: `give(row, panel, sums)`. After them `following` is read.
template <class Format, class Give>
void multiply_panels(const typename Format::Input* x, int64_t rows, int64_t stride,
                     const uint8_t* panels, int count, const uint8_t* following, int64_t inputs,
                     const Give& give) {
  const int64_t bytes = Format::panel_bytes(inputs);
  for (int64_t row = 0; row < rows;) {
    // Tiles of nearly one size: a small one reads its weights for little.
    const int64_t left = rows - row, tiles = (left + Format::kMostRows - 1) / Format::kMostRows;
    const int64_t size = (left + tiles - 1) / tiles;
    const uint8_t* next = left > size ? panels : following;
    const typename Format::Input* from = x + row * stride;
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
void multiply_as(const Matrix& matrix, const typename Format::Input* x, int64_t rows, int64_t stride,
                 const Give& give) {
  share_panels<Format>(
      matrix, Format::panels_at_once(rows),
      [&](int64_t panel, int count, const uint8_t* panels, const uint8_t* following) {
        multiply_panels<Format>(x, rows, stride, panels, count, following, matrix.inputs,
                                [&](int64_t row, int v, Floats sums) { give(row, panel + v, sums); });
      });
}

#ifdef __AVX512BF16__

// For many rows, panels of blocks are unpacked first, once for all of them.
template <class Block, class Give>
void multiply_blocks(const Matrix& matrix, const Input* x, int64_t rows, int64_t stride,
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
                                 [&](int64_t row, int v, Floats sums) { give(row, panel + v, sums); });
      });
}

#else

// A worker's own room for rows as a format wants them.
template <class Input>
Input* room_for_inputs(size_t count) {
  thread_local std::vector<Input> room;
  if (room.size() < count) room.resize(count);
  return room.data();
}

// `multiply_as` of rows that are made into inputs first, a few at a time.
template <class Format, class Give>
void multiply_converted(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride,
                        const Give& give) {
  using Input = typename Format::Input;
  const int64_t width = matrix.inputs / Format::kInputs;
  Input* const converted = room_for_inputs<Input>(std::min(rows, kChunkRows) * width);
  for (int64_t start = 0; start < rows; start += kChunkRows) {
    const int64_t count = std::min(kChunkRows, rows - start);
    for (int64_t row = 0; row < count; row++)
      as_inputs(x + (start + row) * stride, matrix.inputs, converted + row * width);
    const auto pass = [&](int64_t row, int64_t panel, Floats sums) { give(start + row, panel, sums); };
    multiply_as<Format>(matrix, converted, count, width, pass);
  }
}

#endif

// This thread's share of x times the transposed weight: `give(row, first output, sums)`.
template <class Give>
void multiply(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride, const Give& give) {
  const auto take = [&](int64_t row, int64_t panel, Floats sums) {
    const int64_t output = panel * kLanes;
    if (matrix.bias) sums = sums + load(matrix.bias + output);
    give(row, output, sums);
  };
#ifdef __AVX512BF16__
  if (matrix.bits == 4) return multiply_blocks<FourBits>(matrix, x, rows, stride, take);
  if (matrix.bits == 8) return multiply_blocks<EightBits>(matrix, x, rows, stride, take);
  multiply_as<Sixteen>(matrix, x, rows, stride, take);
#else
  if (matrix.bits == 4) return multiply_converted<Nibbles>(matrix, x, rows, stride, take);
  multiply_converted<Sixteen>(matrix, x, rows, stride, take);
#endif
}

}  // namespace
