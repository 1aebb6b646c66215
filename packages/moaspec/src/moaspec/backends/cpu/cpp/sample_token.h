// Seeded sampling: chooses the token with the largest logit / temperature + Gumbel noise, of those that the
// filters keep.
//
// The two logarithms of each token's noise would take most of the time. An upper bound takes one conversion:
// for a uniform number u, -log(-log(u)) <= -log(1 - u), and the bits of a float, read as an integer, bound
// its logarithm. So exact noise is computed only for the few tokens whose bound reaches the best value so
// far.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "top_k.h"
#include "noise.h"

extern "C" {

// The parameters of `moaspec.sampling.choose`. A filter is off at 0, `top_p` at 1.
struct SamplerParams {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
  Place place;  // of the noise
};

}  // extern "C"

namespace {

constexpr int64_t kBoundsPerStep = 128;   // tokens whose bounds are computed together
constexpr float kSlack = 1e-3f;           // exceeds the rounding errors of a bound
constexpr float kMaxInverseTemperature = 1e30f;  // in bounds, which must be finite
constexpr int64_t kTopPCandidates = 512;  // largest tokens that top-p sorts before it sorts all
constexpr float kExactRange = 10.0f;      // masses below e^-10 of the best token's are added in float32
constexpr double kNoThreshold = -std::numeric_limits<double>::max();

// The `count` largest logits, in descending order; NaN is left out.
inline std::vector<float> largest(const float* logits, int64_t size, int64_t count) {
  constexpr int64_t block = 4 * kLanes;
  std::vector<float> found, tops;
  for (int64_t i = 0; i < size; i += block) {
    const float top = highest_of(logits, i, std::min(i + block, size));
    tops.push_back(std::isnan(top) ? -INFINITY : top);  // NaN cannot be sorted
  }
  // At least `count` logits are not below the `count`-th largest maximum of a block.
  float least = -INFINITY;
  if (count < static_cast<int64_t>(tops.size())) {
    std::vector<float> ordered = tops;
    std::nth_element(ordered.begin(), ordered.begin() + count - 1, ordered.end(), std::greater<>());
    least = ordered[count - 1];
  }
  for (size_t b = 0; b < tops.size(); b++) {
    if (tops[b] < least) continue;
    const int64_t stop = std::min<int64_t>((b + 1) * block, size);
    for (int64_t i = b * block; i < stop; i++)
      if (logits[i] >= least) found.push_back(logits[i]);
  }
  count = std::min<int64_t>(count, found.size());
  std::partial_sort(found.begin(), found.begin() + count, found.end(), std::greater<>());
  found.resize(count);
  return found;
}

// The sum of e^((logit - best) / temperature) over tokens whose logit / temperature is at least `least`.
inline double mass_of(const float* logits, int64_t size, double temperature, float best, double least) {
  const bool all_count = least == kNoThreshold;
  const float exact_from = best - kExactRange * static_cast<float>(temperature);
  const Floats inverse_temperature = broadcast(static_cast<float>(1.0 / temperature));
  double mass = 0.0;
  const auto add = [&](int64_t start, int64_t stop) {
    for (int64_t i = start; i < stop; i++)
      if (logits[i] / temperature >= least) mass += std::exp((logits[i] - double{best}) / temperature);
  };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats x = load(logits + i);
    const float top = reduce_max(x);
    if (top / temperature < least) continue;
    if (all_count && top < exact_from)
      mass += reduce_sum(exponential((x - broadcast(best)) * inverse_temperature));
    else
      add(i, i + kLanes);
  }
  add(i, size);
  return mass;
}

// The least logit / temperature that the filters keep.
inline double threshold(const SamplerParams& sampler, const float* logits, int64_t size, float best) {
  double least = kNoThreshold;
  if (sampler.top_k > 0 && sampler.top_k < size) {
    const std::vector<float> found = largest(logits, size, sampler.top_k);
    if (!found.empty()) least = std::max(least, found.back() / sampler.temperature);  // empty if all are NaN
  }
  if (sampler.top_p < 1.0) {
    const double total = mass_of(logits, size, sampler.temperature, best, least);
    for (int64_t count = std::min(kTopPCandidates, size);; count = size) {
      double before = 0.0, last = best / sampler.temperature;
      bool enough = false;
      for (const float logit : largest(logits, size, count)) {
        const double scaled = logit / sampler.temperature;
        enough = before >= sampler.top_p * total || scaled < least;
        if (enough) break;
        last = scaled;
        before += std::exp((logit - double{best}) / sampler.temperature);
      }
      if (!enough && count < size) continue;
      least = std::max(least, last);
      break;
    }
  }
  if (sampler.min_p > 0.0) least = std::max(least, best / sampler.temperature + std::log(sampler.min_p));
  return least;
}

// Calls visit(index, logit / temperature) for indices `start` to `stop` - 1, in order, that reach `least` and
// whose bound, with noise, reaches `value`. `visit` returns the next `value`. Index i stands for token
// names[i], or for token i without `names`.
template <class Visit>
void visit_candidates(const SamplerParams& sampler, const float* logits, const int64_t* names, int64_t start,
                      int64_t stop, float best, double least, double value, const Visit& visit) {
  const double top = best / sampler.temperature;
  const float inverse_temperature =
      static_cast<float>(std::min(1.0 / sampler.temperature, double{kMaxInverseTemperature}));
  uint32_t halves[kBoundsPerStep];
  float bounds[kBoundsPerStep];
  for (int64_t from = start; from < stop; from += kBoundsPerStep) {
    const int64_t count = std::min(kBoundsPerStep, stop - from);
    if (names)
      for (int64_t i = 0; i < count; i++)
        halves[i] = ~noise_words(sampler.place, static_cast<uint32_t>(names[from + i])).high >> 1;
    else
      for (int64_t i = 0; i < count; i++)
        halves[i] = ~noise_words(sampler.place, static_cast<uint32_t>(from + i)).high >> 1;
    // 1 - u >= halves / 2^31, and log2 of a float is at least its exponent + mantissa.
    for (int64_t i = 0; i < count; i++) {
      const float half = static_cast<float>(static_cast<int32_t>(halves[i]));
      int32_t bits;
      std::memcpy(&bits, &half, sizeof(bits));
      const float noise = 0.693147181f * (158.0f - static_cast<float>(bits) * 0x1p-23f);
      // A masked token's -infinity becomes finite: times 0, 1 over a very high temperature, it would be NaN.
      bounds[i] =
          std::max(logits[from + i] - best, -std::numeric_limits<float>::max()) * inverse_temperature + noise;
    }
    float needed = static_cast<float>(value - top) - kSlack;
    if (!(highest_of(bounds, 0, count) >= needed)) continue;
    for (int64_t i = 0; i < count; i++) {
      if (!(bounds[i] >= needed)) continue;
      const double scaled = logits[from + i] / sampler.temperature;
      if (!(scaled >= least)) continue;
      value = visit(from + i, scaled);
      needed = static_cast<float>(value - top) - kSlack;
    }
  }
}

// The token that a sampler chooses, the first of equal ones, computed by a team.
class Draw {
 public:
  explicit Draw(int32_t threads) : tops_(threads, -INFINITY), drawn_(threads, {-INFINITY, 0}) {}

  // Has a barrier at its end.
  void team_draw(const SamplerParams& sampler, const float* logits, int64_t size) {
    const int me = omp_get_thread_num();
    const Range share = share_of(size);
    tops_[me] = highest_of(logits, share.start, share.stop);
#pragma omp barrier
#pragma omp single
    {
      best_ = *std::max_element(tops_.begin(), tops_.end());
      least_ = threshold(sampler, logits, size, best_);
    }
    Drawn own = {-INFINITY, 0};
    visit_candidates(sampler, logits, nullptr, share.start, share.stop, best_, least_, own.value,
                     [&](int64_t token, double scaled) {
                      const double value = scaled + gumbel(sampler.place, static_cast<uint32_t>(token));
                      if (value > own.value) own = {value, token};
                      return own.value;
                    });
    drawn_[me] = own;
#pragma omp barrier
  }

  int64_t token() const {
    const auto before = [](const Drawn& a, const Drawn& b) { return a.value < b.value; };
    return std::max_element(drawn_.begin(), drawn_.end(), before)->token;
  }

 private:
  struct Drawn { double value; int64_t token; };

  std::vector<float> tops_;
  std::vector<Drawn> drawn_;
  float best_ = 0.0f;
  double least_ = kNoThreshold;
};

}  // namespace
