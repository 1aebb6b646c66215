// The largest outputs of each row of a product, computed by a thread team (see `decoder_layer.h`).
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "gemm.h"

namespace {

// The largest of numbers `start` to `stop` - 1.
inline float highest_of(const float* numbers, int64_t start, int64_t stop) {
  Floats tops = broadcast(-INFINITY);
  int64_t i = start;
  for (; i + kLanes <= stop; i += kLanes) tops = maximum(tops, load(numbers + i));
  float top = reduce_max(tops);
  for (; i < stop; i++) top = std::max(top, numbers[i]);
  return top;
}

// The index of each row's largest output, the first of equal ones.
class ArgMax {
 public:
  ArgMax(int64_t rows, int32_t threads)
      : rows_(rows), threads_(threads), thread_stride_(rows * kLanes + kThreadGap),
        tops_(threads * thread_stride_, -INFINITY), outputs_(tops_.size()) {
#ifndef __AVX512BF16__
    lower_bounds_ = tops_;
#endif
  }

  // Each lane of each thread keeps its largest sum, and the first output of the panel that it came from.
  void team_find(const Matrix& matrix, const bf16* x, int64_t stride) {
    const int64_t first = omp_get_thread_num() * thread_stride_;
    std::fill_n(tops_.data() + first, rows_ * kLanes, -INFINITY);
    std::fill_n(outputs_.data() + first, rows_ * kLanes, 0);
    const auto keep = [&](int64_t row, int64_t output, Floats sums) {
      keep_better(tops_.data() + first + row * kLanes, outputs_.data() + first + row * kLanes, output,
                  blend(first_lanes(matrix.outputs - output), sums, broadcast(-INFINITY)));
    };
#ifndef __AVX512BF16__
    if (matrix.bounds) {
      for (int64_t row = 0; row < rows_; row += kBoundedRows)
        team_find_by_bounds(matrix, x + row * stride, row, std::min(kBoundedRows, rows_ - row), stride, keep);
      return;
    }
#endif
    multiply(matrix, x, rows_, stride, keep);
  }

  // Reduces lanes and threads. Needs a barrier after `team_find`.
  int64_t best(int64_t row) const {
    float top = -INFINITY;
    int64_t best = 0;
    for (int64_t i = 0; i < threads_ * kLanes; i++) {
      const int64_t lane = i / kLanes * thread_stride_ + row * kLanes + i % kLanes;
      const int64_t output = outputs_[lane] + i % kLanes;
      if (tops_[lane] > top || (tops_[lane] == top && output < best)) {
        top = tops_[lane];
        best = output;
      }
    }
    return best;
  }

 private:
  static void keep_better(float* tops, int32_t* outputs, int64_t output, Floats sums) {
    const Floats top = load(tops);
    const Mask better = less(top, sums);
    store(tops, blend(better, sums, top));
    masked_store(outputs, better, static_cast<int32_t>(output));
    // Panels do not come in order.
    if (any_equal(top, sums)) keep_first(tops, sums, outputs, output);
  }

#ifndef __AVX512BF16__
  // Calls keep(row, output, 16 sums) for the panels that may have the largest output of one of `rows` rows, the
  // first of which is `first`. An output cannot be the largest if its upper bound is below another's lower bound.
  // A comparison with NaN rules nothing out.
  template <class Keep>
  void team_find_by_bounds(const Matrix& matrix, const bf16* x, int64_t first, int64_t rows, int64_t stride,
                           const Keep& keep) {
    const OutputBounds& bounds = *matrix.bounds;
    const Range panels = share_of((matrix.outputs + kLanes - 1) / kLanes);
    const int64_t start = panels.start * kLanes, width = panels.stop * kLanes - start;
    float* const upper = thread_buffer<OutputBounds, float>(rows * width);
    float* const lower = lower_bounds_.data() + omp_get_thread_num() * thread_stride_ + first * kLanes;
    InputNorms norms[kBoundedRows];
    for (int64_t row = 0; row < rows; row++) norms[row] = norms_of(x + row * stride, matrix.inputs);
    std::fill_n(lower, rows * kLanes, -INFINITY);
    multiply(bounds.copy, x, rows, stride, [&](int64_t row, int64_t output, Floats sums) {
      const Floats slack = multiply_add(broadcast(norms[row].inputs), load(bounds.error + output),
                                        broadcast(norms[row].rounding) * load(bounds.norm + output));
      store(upper + row * width + output - start, sums + slack);
      const Floats least = blend(first_lanes(matrix.outputs - output), sums - slack, broadcast(-INFINITY));
      store(lower + row * kLanes, maximum(least, load(lower + row * kLanes)));  // the second one for NaN
    });
#pragma omp barrier
    Floats floors[kBoundedRows];  // the highest lower bound of each row
    for (int64_t row = 0; row < rows; row++) {
      Floats highest = broadcast(-INFINITY);
      for (int64_t i = 0; i < threads_; i++)
        highest = maximum(highest, load(lower_bounds_.data() + i * thread_stride_ + (first + row) * kLanes));
      floors[row] = broadcast(reduce_max(highest));
    }
    const auto may_have_largest = [&](int64_t panel) {
      for (int64_t row = 0; row < rows; row++)
        if (!all(less(load(upper + row * width + panel * kLanes - start), floors[row]))) return true;
      return false;
    };
    with_inputs(matrix, x, rows, stride, [&](auto format, auto* inputs, int64_t length) {
      for (int64_t panel = panels.start; panel < panels.stop; panel++) {
        const int64_t begin = panel;
        while (panel < panels.stop && may_have_largest(panel)) panel++;
        if (panel > begin)
          multiply_range(
              format, matrix, inputs, rows, length, {begin, panel},
              [&](int64_t row, int64_t at, Floats sums) { keep(first + row, at * kLanes, sums); });
      }
    });
  }
#endif

  static void keep_first(const float* tops, Floats sums, int32_t* outputs, int64_t output) {
    float numbers[kLanes];
    store(numbers, sums);
    for (int i = 0; i < kLanes; i++)
      if (numbers[i] == tops[i]) outputs[i] = std::min(outputs[i], static_cast<int32_t>(output));
  }

  // Numbers between the buffers of two threads, so that they never write to the same cache line.
  static constexpr int64_t kThreadGap = 32;
  static constexpr int64_t kBoundedRows = 16;  // together; bounds the memory of their bounds

  int64_t rows_, threads_, thread_stride_;  // the last: numbers from one thread's buffer to the next
  std::vector<float> tops_;
  std::vector<int32_t> outputs_;
  std::vector<float> lower_bounds_;  // lower bounds on the largest sums
};

// One of a row's best outputs, with the log-probability that it is chosen.
struct TopOutput {
  double value;  // outputs are ranked by it, the largest first
  int32_t output;
  float log_probability;
};

inline bool is_better(const TopOutput& a, const TopOutput& b) { return a.value > b.value; }

// Inserts an output into `count` outputs in descending order, after its equals, and drops the last of them,
// which must be worse.
inline void insert_sorted(TopOutput* best, int64_t count, const TopOutput& one) {
  TopOutput *const last = best + count - 1, *const place = std::upper_bound(best, last, one, is_better);
  std::move_backward(place, last, last + 1);
  *place = one;
}

// The outputs of a product with a few rows. Each row is padded to whole registers.
class Logits {
 public:
  Logits(const Matrix& matrix, int64_t rows)
      : outputs(matrix.outputs), padded((outputs + kLanes - 1) / kLanes * kLanes),
        numbers_(new float[rows * padded]) {}

  // Has a barrier at its end.
  void team_compute(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride) {
    multiply(matrix, x, rows, stride, [&](int64_t row, int64_t output, Floats sums) {
      store(numbers_.get() + row * padded + output,
            blend(first_lanes(outputs - output), sums, broadcast(-INFINITY)));
    });
#pragma omp barrier
  }

  const float* row(int64_t row) const { return numbers_.get() + row * padded; }

  const int64_t outputs, padded;  // numbers of a row, without and with the padding of -infinity

 private:
  std::unique_ptr<float[]> numbers_;  // not initialised: each call writes all rows that it reads
};

// The largest outputs of each row, in descending order, equal ones in the order of their indices, with their
// log-probabilities in the softmax over all outputs.
class TopOutputs {
 public:
  TopOutputs(const Matrix& matrix, int64_t rows, int64_t count)
      : logits_(matrix, rows), blocks_((logits_.padded + kBlockOutputs - 1) / kBlockOutputs), count_(count),
        tops_(rows * blocks_), sums_(tops_.size()), best_(tops_.size() * count) {}

  // Sums are computed by blocks of outputs, so they do not depend on the number of threads.
  void team_find(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride, int64_t /*level*/) {
    logits_.team_compute(matrix, x, rows, stride);
    const Range share = share_of(rows * blocks_);
    for (int64_t i = share.start; i < share.stop; i++) scan_block(i);
  }

  // Needs a barrier after `team_find`.
  std::vector<TopOutput> best(int64_t row) const {
    const int64_t start = row * blocks_, stop = start + blocks_;
    const float top = *std::max_element(tops_.begin() + start, tops_.begin() + stop);
    float sum = 0.0f;
    for (int64_t i = start; i < stop; i++) sum += sums_[i] * std::exp(tops_[i] - top);
    std::vector<TopOutput> found(best_.begin() + start * count_, best_.begin() + stop * count_);
    std::stable_sort(found.begin(), found.end(), is_better);  // blocks are in the order of their outputs
    found.resize(std::min(count_, logits_.outputs));
    for (TopOutput& one : found) one.log_probability = static_cast<float>(one.value) - top - std::log(sum);
    return found;
  }

 private:
  static constexpr int64_t kBlockOutputs = 1024;

  // Largest logit, sum of exponentials, and best outputs of block i of all rows' blocks.
  void scan_block(int64_t i) {
    const int64_t start = i % blocks_ * kBlockOutputs, stop = std::min(start + kBlockOutputs, logits_.padded);
    const float* logits = logits_.row(i / blocks_);
    tops_[i] = highest_of(logits, start, stop);
    Floats sums = broadcast(0.0f);
    for (int64_t k = start; k < stop; k += kLanes)
      sums = sums + exponential(load(logits + k) - broadcast(tops_[i]));
    sums_[i] = reduce_sum(sums);
    TopOutput *const best = best_.data() + i * count_, *const last = best + count_ - 1;
    std::fill_n(best, count_, TopOutput{-INFINITY, 0, 0.0f});
    for (int64_t k = start; k < stop; k += kLanes) {
      if (!(reduce_max(load(logits + k)) > last->value)) continue;
      for (auto output = static_cast<int32_t>(k); output < k + kLanes; output++)
        if (logits[output] > last->value) insert_sorted(best, count_, {logits[output], output, 0.0f});
    }
  }

  Logits logits_;
  int64_t blocks_, count_;
  std::vector<float> tops_, sums_;
  std::vector<TopOutput> best_;
};

}  // namespace
