// Which outputs of a matrix are a row's largest, by a team.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "gemm.h"

namespace {

inline float highest_of(const float* numbers, int64_t start, int64_t stop) {
  Floats tops = all(-INFINITY);
  int64_t i = start;
  for (; i + kLanes <= stop; i += kLanes) tops = larger(tops, load(numbers + i));
  float top = reduce_max(tops);
  for (; i < stop; i++) top = std::max(top, numbers[i]);
  return top;
}

// Which output of a matrix is each row's largest, the first of equal ones.
class ArgMax {
 public:
  ArgMax(int64_t rows, int32_t threads)
      : rows_(rows), threads_(threads), own_(rows * kLanes + kApart), tops_(threads * own_, -INFINITY),
        places_(tops_.size()) {}

  // By a team. Every lane of every thread keeps its own best, and where that was.
  void team_find(const Matrix& matrix, const bf16* x, int64_t stride) {
    const int64_t lanes = rows_ * kLanes;
    float* tops = tops_.data() + omp_get_thread_num() * own_;
    int32_t* places = places_.data() + omp_get_thread_num() * own_;
    std::fill_n(tops, lanes, -INFINITY);
    std::fill_n(places, lanes, 0);
    multiply(matrix, x, rows_, stride, [&](int64_t row, int64_t output, Floats sums) {
      sums = blend(first(matrix.outputs - output), sums, all(-INFINITY));
      const Floats top = load(tops + row * kLanes);
      const Mask better = less(top, sums);
      store(tops + row * kLanes, blend(better, sums, top));
      put(places + row * kLanes, better, static_cast<int32_t>(output));
      // Panels do not come in their order.
      if (any_equal(top, sums)) keep_first(tops + row * kLanes, sums, places + row * kLanes, output);
    });
  }

  // After all threads have held theirs.
  int64_t best(int64_t row) const {
    float top = -INFINITY;
    int64_t best = 0;
    for (int64_t i = 0; i < threads_ * kLanes; i++) {
      const int64_t lane = i / kLanes * own_ + row * kLanes + i % kLanes;
      const int64_t place = places_[lane] + i % kLanes;
      if (tops_[lane] > top || (tops_[lane] == top && place < best)) {
        top = tops_[lane];
        best = place;
      }
    }
    return best;
  }

 private:
  static void keep_first(const float* tops, Floats sums, int32_t* places, int64_t output) {
    float numbers[kLanes];
    store(numbers, sums);
    for (int i = 0; i < kLanes; i++)
      if (numbers[i] == tops[i]) places[i] = std::min(places[i], static_cast<int32_t>(output));
  }

  // Gap between the numbers of two threads, so that they never write to one cache line.
  static constexpr int64_t kApart = 32;

  int64_t rows_, threads_, own_;  // the last: numbers from one thread's to the next one's
  std::vector<float> tops_;
  std::vector<int32_t> places_;
};

// One of a row's best outputs, and the logarithm of how probable its choice is.
struct TopOutput {
  double value;  // the larger the better
  int32_t output;
  float log_probability;
};

inline bool before(const TopOutput& a, const TopOutput& b) { return a.value > b.value; }

// Inserts an output that is better than the last of `count`, which are in descending order, behind its equals.
inline void put_among(TopOutput* best, int64_t count, const TopOutput& one) {
  TopOutput *const last = best + count - 1, *const place = std::upper_bound(best, last, one, before);
  std::move_backward(place, last, last + 1);
  *place = one;
}

// Products of a matrix with a few rows, each in whole registers.
class Logits {
 public:
  Logits(const Matrix& matrix, int64_t rows)
      : outputs(matrix.outputs), padded((outputs + kLanes - 1) / kLanes * kLanes),
        numbers_(new float[rows * padded]) {}

  // By a team, which waits at the end.
  void team_compute(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride) {
    multiply(matrix, x, rows, stride, [&](int64_t row, int64_t output, Floats sums) {
      store(numbers_.get() + row * padded + output, blend(first(outputs - output), sums, all(-INFINITY)));
    });
#pragma omp barrier
  }

  const float* row(int64_t row) const { return numbers_.get() + row * padded; }

  const int64_t outputs, padded;  // with the latter -infinity behind the former

 private:
  std::unique_ptr<float[]> numbers_;  // written by each call before it reads them
};

// The largest outputs of each row, in descending order, the first of equal ones before the others, and
// their shares in the softmax over all.
class TopOutputs {
 public:
  TopOutputs(const Matrix& matrix, int64_t rows, int64_t count)
      : logits_(matrix, rows), blocks_((logits_.padded + kBlockOutputs - 1) / kBlockOutputs), count_(count),
        tops_(rows * blocks_), sums_(tops_.size()), best_(tops_.size() * count) {}

  // By a team. Sums are of blocks, so that they do not depend on the number of threads.
  void team_find(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride, int64_t /*level*/) {
    logits_.team_compute(matrix, x, rows, stride);
    const Stretch share = share_of(rows * blocks_);
    for (int64_t i = share.start; i < share.stop; i++) look_through(i);
  }

  // After all threads have looked.
  std::vector<TopOutput> best(int64_t row) const {
    const int64_t start = row * blocks_, stop = start + blocks_;
    const float top = *std::max_element(tops_.begin() + start, tops_.begin() + stop);
    float sum = 0.0f;
    for (int64_t i = start; i < stop; i++) sum += sums_[i] * std::exp(tops_[i] - top);
    std::vector<TopOutput> found(best_.begin() + start * count_, best_.begin() + stop * count_);
    std::stable_sort(found.begin(), found.end(), before);  // blocks are in the order of their outputs
    found.resize(std::min(count_, logits_.outputs));
    for (TopOutput& one : found) one.log_probability = static_cast<float>(one.value) - top - std::log(sum);
    return found;
  }

 private:
  static constexpr int64_t kBlockOutputs = 1024;

  void look_through(int64_t i) {
    const int64_t start = i % blocks_ * kBlockOutputs, stop = std::min(start + kBlockOutputs, logits_.padded);
    const float* logits = logits_.row(i / blocks_);
    tops_[i] = highest_of(logits, start, stop);
    Floats sums = all(0.0f);
    for (int64_t k = start; k < stop; k += kLanes)
      sums = sums + exponential(load(logits + k) - all(tops_[i]));
    sums_[i] = reduce_sum(sums);
    TopOutput *const best = best_.data() + i * count_, *const last = best + count_ - 1;
    std::fill_n(best, count_, TopOutput{-INFINITY, 0, 0.0f});
    for (int64_t k = start; k < stop; k += kLanes) {
      if (!(reduce_max(load(logits + k)) > last->value)) continue;
      for (auto output = static_cast<int32_t>(k); output < k + kLanes; output++)
        if (logits[output] > last->value) put_among(best, count_, {logits[output], output, 0.0f});
    }
  }

  Logits logits_;
  int64_t blocks_, count_;
  std::vector<float> tops_, sums_;
  std::vector<TopOutput> best_;
};

}  // namespace
