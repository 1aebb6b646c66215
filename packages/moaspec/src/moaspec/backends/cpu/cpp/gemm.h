// Products of a few rows of inputs with a weight in panels.
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

#include "gguf_integers.h"
#include "gguf_weights.h"
#include "w4a8.h"
#ifdef __AVX512BF16__
#include "quantized_blocks.h"
#else
#include "w7a8.h"
#endif
#ifdef __AMX_BF16__
#include "amx_gemm.h"
#endif

namespace {

constexpr int64_t kChunkRows = 192;     // rows that a layer processes at once; bounds scratch memory
constexpr int64_t kEncodedTokens = 16;  // tokens that are encoded at once; bounds scratch memory

}  // namespace

extern "C" {

struct OutputBounds;

// A linear layer's weight, (outputs, inputs), in panels. The last panel is padded with outputs of weight 0.
struct Matrix {
  const void* panels;
  const float* bias;  // or null
  int64_t inputs;
  int64_t outputs;  // with those of `next`
  int64_t bits;     // of a stored weight: 16, 8 or 4
  int64_t rounded;  // 1: inputs are rounded; W4A8 if `bits` is 4, W7A8 if it is 8, else of a GGUF file's blocks
  const OutputBounds* bounds;  // or null
  int64_t kind;        // of a GGUF file's blocks (`gguf_blocks.h`), which decide instead of `bits`; or 0
  const Matrix* next;  // further outputs, in another format; or null
};

// A copy of a matrix without bias, and how far its outputs may be off. Output o differs from the copy's by at
// most error[o] * |x| + norm[o] * |x - rounded x|; |.| is the Euclidean norm.
struct OutputBounds {
  Matrix copy;  // W7A8
  const float *error, *norm;  // padded as the panels are
};

}  // extern "C"

namespace {

// Buffers of a thread that calls kernels, reused by each call. A buffer moves when it grows.
class Scratch {
 public:
  float* floats(int which, size_t count) { return at_least(floats_[which], count); }
  bf16* halves(size_t count) { return at_least(halves_, count); }

 private:
  template <class Number>
  static Number* at_least(std::vector<Number>& numbers, size_t count) {
    if (numbers.size() < count) numbers.resize(count);
    return numbers.data();
  }
  std::vector<float> floats_[2];
  std::vector<bf16> halves_;
};

thread_local Scratch scratch;

// The calling thread's buffer for a purpose, named by a type `Use`: at least `count` numbers.
template <class Use, class Number>
Number* thread_buffer(size_t count) {
  thread_local std::vector<Number> room;
  if (room.size() < count) room.resize(count);
  return room.data();
}

// Calls the micro-kernel for M rows and `count` panels.
template <int M, class Format, class... Rest>
inline void dispatch_tile(Format format, int count, Rest&... rest) {
  if constexpr (M <= Format::kMaxRows) {
    constexpr int most = Format::max_panels(M);
    if constexpr (most >= 4)
      if (count == 4) return format.template tile<M, 4>(rest...);
    if constexpr (most >= 3)
      if (count == 3) return format.template tile<M, 3>(rest...);
    if constexpr (most >= 2)
      if (count == 2) return format.template tile<M, 2>(rest...);
    return format.template tile<M, 1>(rest...);
  }
}

// Multiplies rows with `count` panels, `panel_stride` bytes apart, and calls emit(row, v, 16 sums) for each
// row and panel. `next_panels`, with the same stride, are prefetched for the next call.
template <class Format, class Emit>
void multiply_panels(Format format, const typename Format::Input* x, int64_t rows, int64_t stride,
                     const uint8_t* panels, int count, int64_t panel_stride, const uint8_t* next_panels,
                     int64_t inputs, const Emit& emit) {
  for (int64_t row = 0; row < rows;) {
    // Tiles of nearly equal size: each tile reads all weights, however few its rows are.
    const int64_t left = rows - row, tiles = (left + Format::kMaxRows - 1) / Format::kMaxRows;
    const int64_t size = (left + tiles - 1) / tiles;
    const uint8_t* next = left > size ? panels : next_panels;
    const typename Format::Input* from = x + row * stride;
    Tile tile;
    switch (size) {
      case 8: dispatch_tile<8>(format, count, from, stride, panels, panel_stride, next, inputs, tile); break;
      case 7: dispatch_tile<7>(format, count, from, stride, panels, panel_stride, next, inputs, tile); break;
      case 6: dispatch_tile<6>(format, count, from, stride, panels, panel_stride, next, inputs, tile); break;
      case 5: dispatch_tile<5>(format, count, from, stride, panels, panel_stride, next, inputs, tile); break;
      case 4: dispatch_tile<4>(format, count, from, stride, panels, panel_stride, next, inputs, tile); break;
      case 3: dispatch_tile<3>(format, count, from, stride, panels, panel_stride, next, inputs, tile); break;
      case 2: dispatch_tile<2>(format, count, from, stride, panels, panel_stride, next, inputs, tile); break;
      default: dispatch_tile<1>(format, count, from, stride, panels, panel_stride, next, inputs, tile);
    }
    for (int64_t m = 0; m < size; m++)
      for (int v = 0; v < count; v++) emit(row + m, v, tile.sums[m][v]);
    row += size;
  }
}

#ifdef __AMX_BF16__
// Whether AMX multiplies this number of inputs with weights of a format.
template <class Format>
constexpr bool uses_amx(int64_t inputs) {
  return std::is_same_v<Format, WeightsByOutput> ||
         (std::is_same_v<typename Format::Input, bf16> && inputs % kBlock == 0);
}
#endif

// `multiply_panels`, with AMX where it can be used.
template <class Format, class Emit>
void multiply_any(Format format, const typename Format::Input* x, int64_t rows, int64_t stride,
                  const uint8_t* panels, int count, int64_t panel_stride, const uint8_t* next, int64_t inputs, const Emit& emit) {
#ifdef __AMX_BF16__
  if constexpr (std::is_same_v<Format, WeightsByOutput>)
    return multiply_by_outputs(x, rows, panels, count, panel_stride, next, inputs, emit);
  else if constexpr (std::is_same_v<typename Format::Input, bf16>)
    if (Format::kUnpacks || uses_amx<Format>(inputs))  // a block has as many inputs as an AMX tile
      return multiply_rows<Format>(x, rows, stride, panels, count, panel_stride, next, inputs, emit);
  if constexpr (!std::is_same_v<Format, WeightsByOutput> && !Format::kUnpacks)
#endif
    multiply_panels(format, x, rows, stride, panels, count, panel_stride, next, inputs, emit);
}

// The indices start, ... stop - 1.
struct Range { int64_t start, stop; };

// The calling thread's share of `parts` items.
inline Range share_of(int64_t parts) {
  const int64_t mine = omp_get_thread_num(), all = omp_get_num_threads();
  return {parts * mine / all, parts * (mine + 1) / all};
}

// Multiplies rows with a range of panels, adds the bias, and calls emit(row, panel, 16 sums).
template <class Format, class Emit>
void multiply_range(Format format, const Matrix& matrix, const typename Format::Input* x, int64_t rows,
                    int64_t stride, Range range, const Emit& emit) {
  const int64_t inputs = matrix.inputs, bytes = format.panel_bytes(inputs);
  int64_t streams = format.panels_at_once(rows);
#ifdef __AMX_BF16__
  std::optional<AmxTileConfig> tiles;
  if constexpr (std::is_same_v<Format, WeightsByOutput>) {
    tiles.emplace(RowTiles(rows).size, WeightsByOutput::first_rows(rows));
  } else if (uses_amx<Format>(inputs)) {
    tiles.emplace(RowTiles(rows).size);
    streams = amx_panels(rows);
  }
#endif
  const auto at = [&](int64_t panel) { return static_cast<const uint8_t*>(matrix.panels) + panel * bytes; };
  const auto multiply_group = [&](int64_t first, int64_t count, int64_t step, int64_t next) {
    const int num = static_cast<int>(count);
    const auto emit_sums = [&](int64_t row, int v, Floats sums) {
      const int64_t panel = first + v * step;
      if (matrix.bias) sums = sums + load(matrix.bias + panel * kLanes);
      emit(row, panel, sums);
    };
    const auto emit_all = [&](const float* sums) {
      for (int64_t row = 0; row < rows; row++) emit_sums(row, 0, load(sums + row * kLanes));
    };
    if constexpr (std::is_same_v<Format, GgufIntegers>) {
      float* const sums = thread_buffer<Format, float>(rows * kLanes);
      with_kind(format.kind, [&](auto kind) {
        multiply_integers<kind>(x, rows, stride, at(first), at(next), inputs, sums);
      });
      return emit_all(sums);
    }
#ifndef __AVX512BF16__
    if constexpr (std::is_same_v<Format, GgufWeights>)
      if (rows > Format::kMaxRows) {
        float* const sums = thread_buffer<Format, float>(rows * kLanes);
        with_kind(format.kind, [&](auto kind) {
          multiply_unpacked<kind>(x, rows, stride, at(first), inputs, sums);
        });
        return emit_all(sums);
      }
#else
    if constexpr (Format::kUnpacks)
      if (rows > kUnpackedRows) {  // dequantised once for all rows
        const int64_t size = Bf16Weights::panel_bytes(inputs);
        uint8_t* const room = thread_buffer<Format, uint8_t>(count * size);
        for (int v = 0; v < num; v++)
          Format::unpack(at(first + v * step), inputs, reinterpret_cast<bf16*>(room + v * size));
        return multiply_any(Bf16Weights(), x, rows, stride, room, num, size, room, inputs, emit_sums);
      }
#endif
    if constexpr (!std::is_same_v<Format, GgufIntegers>)
      multiply_any(format, x, rows, stride, at(first), num, step * bytes, at(next), inputs, emit_sums);
  };
  // The panels of a group are `length` panels apart, so that each is a stream of its own from memory: a CPU
  // prefetches several long streams faster than one.
  const int64_t length = (range.stop - range.start) / streams;
  const int64_t tail = range.start + streams * length;
  for (int64_t i = 0; i < length; i++) {
    const int64_t panel = range.start + i;
    multiply_group(panel, streams, length, i + 1 < length ? panel + 1 : panel);
  }
  if (tail < range.stop) multiply_group(tail, range.stop - tail, 1, tail);
}

// Rows converted to a format's inputs, in the thread's buffer.
template <class Format>
const typename Format::Input* converted(const Matrix& matrix, const bf16* x, int64_t rows,
                                        int64_t stride) {
  using Input = typename Format::Input;
  const int64_t width = matrix.inputs / Format::kInputs;
  Input* const to = thread_buffer<Format, Input>(rows * width);
  for (int64_t row = 0; row < rows; row++) as_inputs(x + row * stride, matrix.inputs, to + row * width);
  return to;
}

#ifdef __AMX_BF16__
// Rows in the layout that `WeightsByOutput` reads, in the thread's buffer.
inline const uint32_t* paired(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride) {
  const RowTiles tiles(rows);
  uint32_t* const to = thread_buffer<WeightsByOutput, uint32_t>(tiles.count * tiles.size * matrix.inputs / 2);
  as_pairs(x, tiles, stride, matrix.inputs, to);
  return to;
}
#endif

// Calls use(format) with the format of a matrix.
template <class Use>
auto with_format(const Matrix& matrix, const Use& use) {
  if (matrix.kind) {
    if (matrix.rounded) return use(GgufIntegers{{matrix.kind}});
    return use(GgufWeights{matrix.kind});
  }
#ifndef __AVX512BF16__
  if (matrix.rounded && matrix.bits == 8) return use(W7A8Weights());
#endif
  if (matrix.rounded) return use(W4A8Weights());
#ifdef __AMX_BF16__
  if (matrix.bits == 4) return use(WeightsByOutput());
#elif defined(__AVX512BF16__)
  if (matrix.bits == 4) return use(BlockWeights<FourBits>());
#endif
#ifdef __AVX512BF16__
  if (matrix.bits == 8) return use(BlockWeights<EightBits>());
#endif
  return use(Bf16Weights());
}

// Calls use(format, inputs, stride): the format of a matrix, and rows converted to its inputs.
template <class Use>
void with_inputs(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride, const Use& use) {
  with_format(matrix, [&](auto format) {
    using Format = decltype(format);
#ifdef __AMX_BF16__
    if constexpr (std::is_same_v<Format, WeightsByOutput>)
      return use(format, paired(matrix, x, rows, stride), 0);
    else
#endif
    if constexpr (std::is_same_v<typename Format::Input, bf16>)
      return use(format, x, stride);
    else
      return use(format, converted<Format>(matrix, x, rows, stride), matrix.inputs / Format::kInputs);
  });
}

// Outputs of a matrix without those of `next`.
inline int64_t own_outputs(const Matrix& matrix) {
  return matrix.outputs - (matrix.next ? matrix.next->outputs : 0);
}

// The matrix without its first `outputs` outputs, a multiple of 16.
inline Matrix without_first(Matrix matrix, int64_t outputs) {
  while (matrix.next && outputs >= own_outputs(matrix)) {
    outputs -= own_outputs(matrix);
    matrix = *matrix.next;
  }
  const int64_t bytes =
      with_format(matrix, [&](auto format) { return format.panel_bytes(matrix.inputs); });
  matrix.outputs -= outputs;
  matrix.panels = static_cast<const uint8_t*>(matrix.panels) + outputs / kLanes * bytes;
  if (matrix.bias) matrix.bias += outputs;
  return matrix;
}

// Computes the calling thread's share of x times the transposed weight, plus the bias, and calls
// emit(row, first output, 16 sums). Rows of x are `stride` numbers apart.
template <class Emit>
void multiply(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride, const Emit& emit) {
  int64_t first = 0;
  for (const Matrix* part = &matrix; part; first += own_outputs(*part), part = part->next) {
    const Range mine = share_of((own_outputs(*part) + kLanes - 1) / kLanes);
    for (int64_t start = 0; start < rows; start += kChunkRows) {
      const int64_t count = std::min(kChunkRows, rows - start);
      with_inputs(*part, x + start * stride, count, stride, [&](auto format, auto* inputs, int64_t width) {
        const auto emit_outputs = [&](int64_t row, int64_t panel, Floats sums) {
          emit(start + row, first + panel * kLanes, sums);
        };
        multiply_range(format, *part, inputs, count, width, mine, emit_outputs);
      });
    }
  }
}

}  // namespace
