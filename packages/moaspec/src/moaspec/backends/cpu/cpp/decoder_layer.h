// A decoder layer without its attention, computed by a thread team.
//
// All threads of a parallel region call a `team_*` function with the same arguments. Unless its comment says
// so, it has no barrier at its end, so its callers need one before a thread reads its output. Each thread
// computes all norms for itself: this takes less time than a barrier with few rows, and far less than the
// products with many.
#pragma once

#include "gemm.h"

extern "C" {

struct Layer {
  Matrix read;    // projection to queries, keys and values
  Matrix output;  // projection after attention
  Matrix inner;   // gate, then up projection of the MLP
  Matrix down;
  const bf16* norm;       // RMSNorm before `read`
  const bf16* inner_norm; // RMSNorm before `inner`
  const bf16* query_norm; // RMSNorm of each query head, or null
  const bf16* key_norm;   // of each key head, or null
  float eps;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
};

}  // extern "C"

namespace {

// Outputs of `inner` (gate and up, all rows) that a thread computes before it multiplies gate with up. They
// stay in its cache.
#ifdef __AMX_BF16__
constexpr int64_t kGateNumbers = 8192;  // with fewer, prefetching is worse
#else
constexpr int64_t kGateNumbers = 2048;
#endif
constexpr int64_t kMinGatePanels = 8;  // gate panels at a time, at least

// RMSNorm of n numbers, a multiple of 16; read(i) loads numbers i to i + 15.
template <class Read>
inline void rms_norm(const Read& read, const bf16* weight, float eps, int64_t n, bf16* out) {
  Floats squares = broadcast(0.0f);
  for (int64_t i = 0; i < n; i += kLanes) squares = multiply_add(read(i), read(i), squares);
  const float mean = reduce_sum(squares) / static_cast<float>(n);
  const Floats factor = broadcast(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, read(i) * factor * load(weight + i));
}

// Rotary embedding of a head: rotates numbers i and i + turned / 2 of the first `turned`, and copies the
// others.
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

// `rotate` of all 2 * `half` numbers of a head; `half` is a multiple of 16.
inline void rotate_lanes(const float* x, const float* cos, const float* sin, int64_t half, bf16* out) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const Floats a = load(x + i), b = load(x + i + half);
    store(out + i, subtract_product(b, load(sin + i), a * load(cos + i)));
    store(out + i + half, multiply_add(a, load(sin + i + half), b * load(cos + i + half)));
  }
}

// Cosines and sines, (period, turned). Row i of a pass has those of i % period.
struct Angles {
  const float *cos, *sin;
  int64_t turned, period;
};

// The layer as far as it projects to keys and values.
inline Layer without_queries(const Layer& layer) {
  const int64_t queries = layer.heads * layer.head_dim;
  Layer rest = layer;
  rest.heads = 0;
  rest.read = without_first(layer.read, queries);
  return rest;
}

// Buffers that the threads of a team share within a layer.
struct LayerScratch {
  float* qkv;       // outputs of `read`, (rows, outputs)
  float* residual;  // the residual stream after attention, (rows, E)
  bf16* gated;      // inputs of `down`, (rows, inputs)
};

// Buffers for `rows` rows of a layer, of which each `group` are averaged. All calls of a thread return the
// same buffers; those of an earlier call are invalid if the buffers have grown since.
inline LayerScratch scratch_for(const Layer& layer, int64_t rows, int64_t group = 1) {
  const int64_t count = std::max(std::min(rows, kChunkRows), group);
  return {scratch.floats(0, count * layer.read.outputs), scratch.floats(1, count * layer.output.outputs),
          scratch.halves(count * layer.down.inputs)};
}

// RMSNorm of contiguous rows, in the thread's buffer.
template <class Number>
const bf16* rms_normed(const Number* x, const bf16* weight, float eps, int64_t rows, int64_t width) {
  bf16* const to = thread_buffer<LayerScratch, bf16>(rows * width);
  for (int64_t row = 0; row < rows; row++)
    rms_norm([&](int64_t i) { return load(x + row * width + i); }, weight, eps, width, to + row * width);
  return to;
}

// RMSNorm, projection to queries, keys and values, norms of heads, rotary embedding. Each of a row's H + 2 J
// heads is written to place(row, head).
template <class Place>
void team_project(const Layer& layer, const bf16* x, int64_t rows, const Angles& angles,
                  const LayerScratch& shared, const Place& place) {
  const int64_t width = layer.read.inputs, dim = layer.head_dim;
  const int64_t heads = layer.heads + 2 * layer.kv_heads, rotated_heads = heads - layer.kv_heads;
  for (int64_t start = 0; start < rows; start += kChunkRows) {
    const int64_t count = std::min(kChunkRows, rows - start);
    const bf16* normed = rms_normed(x + start * width, layer.norm, layer.eps, count, width);
    if (start > 0) {
#pragma omp barrier
    }
    multiply(layer.read, normed, count, width, [&](int64_t row, int64_t output, Floats sums) {
      store(shared.qkv + row * heads * dim + output, sums);
    });
#pragma omp barrier
    const Range share = share_of(count * heads);
    for (int64_t i = share.start; i < share.stop; i++) {
      const int64_t row = start + i / heads, head = i % heads;
      float* from = shared.qkv + i * dim;
      bf16* to = place(row, head);
      const bf16* weight = head < layer.heads ? layer.query_norm : layer.key_norm;
      if (weight && head < rotated_heads) {
        rms_norm([&](int64_t k) { return load(from + k); }, weight, layer.eps, dim, to);
        for (int64_t k = 0; k < dim; k += kLanes) store(from + k, load(to + k));
      }
      const int64_t first = row % angles.period * angles.turned;
      const int64_t turned = head < rotated_heads ? angles.turned : 0;
      if (turned == dim && dim % (2 * kLanes) == 0)
        rotate_lanes(from, angles.cos + first, angles.sin + first, dim / 2, to);
      else
        rotate(from, angles.cos + first, angles.sin + first, turned, dim, to);
    }
  }
}

// silu(gate) * up, averaged over each `group` rows: (rows / group, inputs of `down`). A thread computes its
// panels of gate and the same panels of up, `chunk_panels` of each at a time.
inline void team_gate(const Matrix& inner, const bf16* x, int64_t rows, int64_t group, bf16* out) {
  const int64_t width = inner.outputs / 2, half = width / kLanes;
  const int64_t fitting = kGateNumbers / (2 * rows * kLanes) / kMaxPanels * kMaxPanels;
  const int64_t chunk_panels = std::max<int64_t>(kMinGatePanels, fitting);
  const Floats row_weight = broadcast(1.0f / static_cast<float>(group));
  with_inputs(inner, x, rows, inner.inputs, [&](auto format, auto* inputs, int64_t stride) {
    const Range mine = share_of(half);
    float* const buffer = thread_buffer<Layer, float>(2 * rows * chunk_panels * kLanes);
    for (int64_t start = mine.start; start < mine.stop; start += chunk_panels) {
      const int64_t stop = std::min(start + chunk_panels, mine.stop);
      const auto gate = [&](int64_t row, int64_t panel) {
        return buffer + 2 * (row * chunk_panels + panel - start) * kLanes;
      };
      for (const int64_t first : {int64_t{0}, half})
        multiply_range(
            format, inner, inputs, rows, stride, {first + start, first + stop},
            [&](int64_t row, int64_t panel, Floats numbers) {
              store(gate(row, panel - first) + (first ? kLanes : 0), numbers);
            });
      for (int64_t mean = 0; mean < rows / group; mean++)
        for (int64_t panel = start; panel < stop; panel++) {
          Floats sums = broadcast(0.0f);
          for (int64_t row = mean * group; row < (mean + 1) * group; row++)
            sums = multiply_add(silu(load(gate(row, panel))), load(gate(row, panel) + kLanes), sums);
          store(out + mean * width + panel * kLanes, sums * row_weight);
        }
    }
  });
}

// The rest of a layer after attention: output projection, residual, RMSNorm, gated MLP, residual, averaged
// over each `group` rows: (rows / group, E). `down` is linear, so it is applied to the means.
inline void team_finish(const Layer& layer, const bf16* x, const bf16* attended, int64_t rows, int64_t group,
                        const LayerScratch& shared, bf16* out) {
  const int64_t width = layer.output.outputs, attended_width = layer.output.inputs;
  const int64_t chunk = std::max<int64_t>(1, kChunkRows / group) * group;
  const Floats row_weight = broadcast(1.0f / static_cast<float>(group));
  for (int64_t start = 0; start < rows; start += chunk) {
    const int64_t count = std::min(chunk, rows - start), means = count / group;
    const bf16* from = x + start * width;
    if (start > 0) {
#pragma omp barrier
    }
    multiply(layer.output, attended + start * attended_width, count, attended_width,
             [&](int64_t row, int64_t output, Floats sums) {
               const int64_t place = row * width + output;
               store(shared.residual + place, load(from + place) + sums);
             });
#pragma omp barrier
    const bf16* normed = rms_normed(shared.residual, layer.inner_norm, layer.eps, count, width);
    team_gate(layer.inner, normed, count, group, shared.gated);
#pragma omp barrier
    multiply(layer.down, shared.gated, means, layer.down.inputs,
             [&](int64_t mean, int64_t output, Floats sums) {
               Floats residuals = broadcast(0.0f);
               for (int64_t row = mean * group; row < (mean + 1) * group; row++)
                 residuals = residuals + load(shared.residual + row * width + output);
               store(out + (start / group + mean) * width + output,
                     multiply_add(residuals, row_weight, sums));
             });
  }
}

}  // namespace
