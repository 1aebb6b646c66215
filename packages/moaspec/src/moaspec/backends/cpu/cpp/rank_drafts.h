// Ranks drafts for a request that samples, as `moaspec.drafting.path_scores` does: by the drafter's logits
// with the noise that the target's choice will have.
#pragma once

#include "sample_token.h"

extern "C" {

struct Coupling {
  SamplerParams sampler;   // of the first level of drafts; its temperature is divided by the sharpness
  const float* agreement;  // (ranks, 2): the target chooses a draft with probability sigmoid(a + b * margin)
  int64_t ranks;           // the last line also holds for further ranks
};

}  // extern "C"

namespace {

// The outputs of each row with the largest logit / temperature + Gumbel noise, in descending order, among
// those that the filters keep.
class Coupled {
 public:
  Coupled(const Matrix& matrix, int64_t rows, int64_t count, const Coupling& coupling, const int64_t* names)
      : logits_(matrix, rows), blocks_((logits_.outputs + kNoiseShare - 1) / kNoiseShare), count_(count + 1),
        coupling_(coupling), names_(names), tops_(rows), thresholds_(rows), best_(rows * blocks_ * count_) {}

  void team_find(const Matrix& matrix, const bf16* x, int64_t rows, int64_t stride, int64_t level) {
    logits_.team_compute(matrix, x, rows, stride);
    SamplerParams sampler = coupling_.sampler;
    sampler.place.position += level;
    const Range row_share = share_of(rows), share = share_of(rows * blocks_);
    for (int64_t row = row_share.start; row < row_share.stop; row++) {
      tops_[row] = highest_of(logits_.row(row), 0, logits_.padded);
      thresholds_[row] = threshold(sampler, logits_.row(row), logits_.outputs, tops_[row]);
    }
#pragma omp barrier
    for (int64_t i = share.start; i < share.stop; i++) scan_block(sampler, i);
  }

  // Needs a barrier after `team_find`.
  std::vector<TopOutput> best(int64_t row) const {
    const auto start = best_.begin() + row * blocks_ * count_;
    std::vector<TopOutput> found(start, start + blocks_ * count_);
    std::stable_sort(found.begin(), found.end(), is_better);
    found.resize(std::min<int64_t>(count_, found.size()));
    while (!found.empty() && found.back().value == -INFINITY) found.pop_back();
    const double second = found.size() > 1 ? found[1].value : -INFINITY;
    for (size_t rank = 0; rank < found.size(); rank++) {
      const double margin = found[0].value - (rank ? found[rank].value : second);
      const float* coefficients = coupling_.agreement + 2 * std::min<int64_t>(rank, coupling_.ranks - 1);
      found[rank].log_probability =
          static_cast<float>(log_sigmoid(coefficients[0] + coefficients[1] * margin));
    }
    found.resize(std::min<size_t>(found.size(), count_ - 1));  // the last was for the margin of the first
    return found;
  }

 private:
  static double log_sigmoid(double x) {
    return x < 0.0 ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x));
  }

  // The best outputs of block i of all rows' blocks.
  void scan_block(const SamplerParams& sampler, int64_t i) {
    const int64_t row = i / blocks_, start = i % blocks_ * kNoiseShare;
    TopOutput *const best = best_.data() + i * count_, *const last = best + count_ - 1;
    std::fill_n(best, count_, TopOutput{-INFINITY, 0, 0.0f});
    const int64_t stop = std::min(start + kNoiseShare, logits_.outputs);
    visit_candidates(sampler, logits_.row(row), names_, start, stop, tops_[row], thresholds_[row], -INFINITY,
                     [&](int64_t i, double scaled) {
                      const auto output = static_cast<int32_t>(i);
                      const double value = scaled + gumbel(sampler.place, static_cast<uint32_t>(names_[i]));
                      if (value > last->value) insert_sorted(best, count_, {value, output, 0.0f});
                      return last->value;
                    });
  }

  Logits logits_;
  int64_t blocks_, count_;
  const Coupling& coupling_;
  const int64_t* names_;
  std::vector<float> tops_;
  std::vector<double> thresholds_;
  std::vector<TopOutput> best_;
};

}  // namespace
