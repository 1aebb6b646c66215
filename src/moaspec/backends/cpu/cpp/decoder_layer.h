// A decoder layer but for its attention, by a team.
//
// A function whose name begins with `team_` is called by all threads of a parallel region, with the same
// arguments. Unless it says so it does not wait at its end: others may still be at work on its output, so
// that a barrier comes before anybody reads that. Norms, which take less time than a barrier where rows are
// few and far less than their products where they are many, every thread computes for itself.
#pragma once

#include "gemm.h"

extern "C" {

struct Layer {
  Matrix read;    // query, key and value
  Matrix output;  // of the attention
  Matrix inner;   // gate and up
  Matrix down;
  const bf16* norm;       // before `read`
  const bf16* inner_norm; // before `inner`
  const bf16* query_norm; // of each head, or null
  const bf16* key_norm;
  float eps;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
};

}  // extern "C"

namespace {

// Numbers of gates, and of what they are multiplied with, before they are.
#ifdef __AMX_BF16__
constexpr int64_t kNearNumbers = 8192;  // fewer panels at a time are less well fetched ahead
#else
constexpr int64_t kNearNumbers = 2048;
#endif
constexpr int64_t kFewestPanels = 8;    // of gates, however many rows there are

// RMSNorm of n numbers, a multiple of 16.
template <class Read>
inline void rms_norm(const Read& read, const bf16* weight, float eps, int64_t n, bf16* out) {
  Floats squares = all(0.0f);
  for (int64_t i = 0; i < n; i += kLanes) squares = multiply_add(read(i), read(i), squares);
  const float mean = reduce_sum(squares) / static_cast<float>(n);
  const Floats factor = all(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, read(i) * factor * load(weight + i));
}

// Rotary embedding of one head: the first `turned` numbers, halves against each other.
inline void rotate(const float* x, const float* cos, const float* sin, int64_t turned, int64_t dim,
                   bf16* out) {
  const int64_t half = turned / 2;
  for (int64_t i = 0; i < half; i++) {
    out[i] = rounded(x[i] * cos[i] - x[i + half] * sin[i]);
    out[i + half] = rounded(x[i + half] * cos[i + half] + x[i] * sin[i + half]);
  }
  int64_t i = turned;
  for (; i + kLanes <= dim; i += kLanes) store(out + i, load(x + i));
  for (; i < dim; i++) out[i] = rounded(x[i]);
}

inline void rotate_fast(const float* x, const float* cos, const float* sin, int64_t half, bf16* out) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const Floats a = load(x + i), b = load(x + i + half);
    store(out + i, subtract_product(b, load(sin + i), a * load(cos + i)));
    store(out + i + half, multiply_add(a, load(sin + i + half), b * load(cos + i + half)));
  }
}

// Cosines and sines, (period, turned): those of row 0, 1, ... and again from the start.
struct Angles {
  const float *cos, *sin;
  int64_t turned, period;
};

// What the threads of a team share inside a layer.
struct Room {
  float* joined;  // what `read` gives, (rows, outputs)
  float* middle;  // the residual behind attention, (rows, E)
  bf16* gated;    // what `down` is given, (rows, inputs)
};

// Memory for calls of this layer with `rows` rows, in means of `group` rows. Every call of a thread
// gives the same memory, which may have moved since the one before, as it grows.
inline Room room_for(const Layer& layer, int64_t rows, int64_t group = 1) {
  const int64_t count = std::max(std::min(rows, kChunkRows), group);
  return {scratch.floats(0, count * layer.read.outputs), scratch.floats(1, count * layer.output.outputs),
          scratch.halves(count * layer.down.inputs)};
}

// RMSNorm of rows, contiguous, in the calling thread's own memory.
template <class Number>
const bf16* rms_normed(const Number* x, const bf16* weight, float eps, int64_t rows, int64_t width) {
  bf16* const to = own<Room, bf16>(rows * width);
  for (int64_t row = 0; row < rows; row++)
    rms_norm([&](int64_t i) { return load(x + row * width + i); }, weight, eps, width, to + row * width);
  return to;
}

// Norm, products, norms of heads and rotary embeddings: each of the H + 2 J heads goes to
// `place(row, head)`.
template <class Place>
void team_project(const Layer& layer, const bf16* x, int64_t rows, const Angles& angles, const Room& room,
                  const Place& place) {
  const int64_t width = layer.read.inputs, dim = layer.head_dim;
  const int64_t heads = layer.heads + 2 * layer.kv_heads, turning = heads - layer.kv_heads;
  for (int64_t start = 0; start < rows; start += kChunkRows) {
    const int64_t count = std::min(kChunkRows, rows - start);
    const bf16* normed = rms_normed(x + start * width, layer.norm, layer.eps, count, width);
    if (start > 0) {
#pragma omp barrier
    }
    multiply(layer.read, normed, count, width, [&](int64_t row, int64_t output, Floats sums) {
      store(room.joined + row * heads * dim + output, sums);
    });
#pragma omp barrier
    const Stretch share = share_of(count * heads);
    for (int64_t i = share.start; i < share.stop; i++) {
      const int64_t row = start + i / heads, head = i % heads;
      float* from = room.joined + i * dim;
      bf16* to = place(row, head);
      const bf16* weight = head < layer.heads ? layer.query_norm : layer.key_norm;
      if (weight && head < turning) {
        rms_norm([&](int64_t k) { return load(from + k); }, weight, layer.eps, dim, to);
        for (int64_t k = 0; k < dim; k += kLanes) store(from + k, load(to + k));
      }
      const int64_t first = row % angles.period * angles.turned;
      const int64_t turned = head < turning ? angles.turned : 0;
      if (turned == dim && dim % (2 * kLanes) == 0)
        rotate_fast(from, angles.cos + first, angles.sin + first, dim / 2, to);
      else
        rotate(from, angles.cos + first, angles.sin + first, turned, dim, to);
    }
  }
}

// The mean of each `group` rows of silu(gate) * up, (rows / group, inputs of `down`). A thread computes
// both halves of its numbers, as many of each in turns as stay near.
inline void team_gate(const Matrix& inner, const bf16* x, int64_t rows, int64_t group, bf16* out) {
  const int64_t width = inner.outputs / 2, half = width / kLanes;
  const int64_t near = kNearNumbers / (2 * rows * kLanes) / kMostPanels * kMostPanels;
  const int64_t most = std::max<int64_t>(kFewestPanels, near);
  const Floats share_of_row = all(1.0f / static_cast<float>(group));
  with_format(inner, x, rows, inner.inputs, [&](auto format, auto* inputs, int64_t stride) {
    const Stretch mine = share_of(half);
    float* const near_room = own<Layer, float>(2 * rows * most * kLanes);
    for (int64_t start = mine.start; start < mine.stop; start += most) {
      const int64_t stop = std::min(start + most, mine.stop);
      const auto gate = [&](int64_t row, int64_t panel) {
        return near_room + 2 * (row * most + panel - start) * kLanes;
      };
      for (const int64_t first : {int64_t{0}, half})
        multiply_stretch<decltype(format)>(
            inner, inputs, rows, stride, {first + start, first + stop},
            [&](int64_t row, int64_t panel, Floats numbers) {
              store(gate(row, panel - first) + (first ? kLanes : 0), numbers);
            });
      for (int64_t mean = 0; mean < rows / group; mean++)
        for (int64_t panel = start; panel < stop; panel++) {
          Floats sums = all(0.0f);
          for (int64_t row = mean * group; row < (mean + 1) * group; row++)
            sums = multiply_add(silu(load(gate(row, panel))), load(gate(row, panel) + kLanes), sums);
          store(out + mean * width + panel * kLanes, sums * share_of_row);
        }
    }
  });
}

// Output projection, residual, norm, gated MLP, residual: the mean of each `group` rows,
// (rows / group, E). The last projection is linear, so it follows the mean.
inline void team_finish(const Layer& layer, const bf16* x, const bf16* read, int64_t rows, int64_t group,
                        const Room& room, bf16* out) {
  const int64_t width = layer.output.outputs, read_width = layer.output.inputs;
  const int64_t chunk = std::max<int64_t>(1, kChunkRows / group) * group;
  const Floats share_of_row = all(1.0f / static_cast<float>(group));
  for (int64_t start = 0; start < rows; start += chunk) {
    const int64_t count = std::min(chunk, rows - start), means = count / group;
    const bf16* from = x + start * width;
    if (start > 0) {
#pragma omp barrier
    }
    multiply(layer.output, read + start * read_width, count, read_width,
             [&](int64_t row, int64_t output, Floats sums) {
               const int64_t place = row * width + output;
               store(room.middle + place, load(from + place) + sums);
             });
#pragma omp barrier
    const bf16* normed = rms_normed(room.middle, layer.inner_norm, layer.eps, count, width);
    team_gate(layer.inner, normed, count, group, room.gated);
#pragma omp barrier
    multiply(layer.down, room.gated, means, layer.down.inputs,
             [&](int64_t mean, int64_t output, Floats sums) {
               Floats residual = all(0.0f);
               for (int64_t row = mean * group; row < (mean + 1) * group; row++)
                 residual = residual + load(room.middle + row * width + output);
               store(out + (start / group + mean) * width + output,
                     multiply_add(residual, share_of_row, sums));
             });
  }
}

}  // namespace
