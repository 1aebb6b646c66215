// Seeded sampling: the largest logit / temperature + noise, of the tokens that the filters leave.
//
// Two logarithms for each token of a vocabulary take longer than all else. But noise has an upper bound
// that takes one conversion: with a uniform number u, -log(-log(u)) is at most -log(1 - u), and the bits
// of a float, read as an integer, bound its logarithm. So exact noise is computed only for the few tokens
// whose bound reaches the best value so far.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "top_k.h"
#include "noise.h"

extern "C" {

// As `moaspec.sampling.choose` has it. Zero, or one for `top_p`, leaves all tokens.
struct SamplerParams {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
  Place place;  // of the noise
};

}  // extern "C"

namespace {

constexpr int64_t kBoundsTogether = 128;  // tokens whose bounds are computed together
constexpr float kSlack = 1e-3f;           // more than the bound's rounding errors
constexpr float kSteepest = 1e30f;        // of one over the temperature, in bounds
constexpr int64_t kTopPCandidates = 512;  // that top-p looks at before it sorts them all
constexpr float kExactMass = 10.0f;       // beyond which, e^-10 of the best one, shares are of float32
constexpr double kNoLeast = -std::numeric_limits<double>::max();

// The `count` largest, in descending order.
inline std::vector<float> largest(const float* logits, int64_t size, int64_t count) {
  constexpr int64_t block = 4 * kLanes;
  std::vector<float> found, tops;
  for (int64_t i = 0; i < size; i += block) {
    const float top = highest_of(logits, i, std::min(i + block, size));
    tops.push_back(std::isnan(top) ? -INFINITY : top);  // which has no order
  }
  // At least `count` numbers are no smaller than the `count`-th largest of blocks' largest.
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

// The sum of e^(logit / temperature - that of `best`), over quotients of at least `least`.
inline double mass_of(const float* logits, int64_t size, double temperature, float best, double least) {
  const bool all_count = least == kNoLeast;
  const float far = best - kExactMass * static_cast<float>(temperature);
  const Floats steep = all(static_cast<float>(1.0 / temperature));
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
    if (all_count && top < far)
      mass += reduce_sum(exponential((x - all(best)) * steep));
    else
      add(i, i + kLanes);
  }
  add(i, size);
  return mass;
}

// The smallest quotient of logit and temperature that a token may have.
inline double threshold(const SamplerParams& sampler, const float* logits, int64_t size, float best) {
  double least = kNoLeast;
  if (sampler.top_k > 0 && sampler.top_k < size) {
    const std::vector<float> found = largest(logits, size, sampler.top_k);
    if (!found.empty()) least = std::max(least, found.back() / sampler.temperature);  // none where all are NaN
  }
  if (sampler.top_p < 1.0) {
    const double whole = mass_of(logits, size, sampler.temperature, best, least);
    for (int64_t count = std::min(kTopPCandidates, size);; count = size) {
      double before = 0.0, last = best / sampler.temperature;
      bool enough = false;
      for (const float logit : largest(logits, size, count)) {
        const double scaled = logit / sampler.temperature;
        enough = before >= sampler.top_p * whole || scaled < least;
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

// Calls `look(index, scaled logit)` for tokens from `start` to `stop` whose bound reaches `value`, in order;
// `look` returns the next `value`. The noise of token i is that of `names[i]`, or of i.
template <class Look>
void show_candidates(const SamplerParams& sampler, const float* logits, const int64_t* names, int64_t start,
                     int64_t stop, float best, double least, double value, const Look& look) {
  const double top = best / sampler.temperature;
  const float steep = static_cast<float>(std::min(1.0 / sampler.temperature, double{kSteepest}));
  uint32_t halves[kBoundsTogether];
  float bounds[kBoundsTogether];
  for (int64_t from = start; from < stop; from += kBoundsTogether) {
    const int64_t count = std::min(kBoundsTogether, stop - from);
    if (names)
      for (int64_t i = 0; i < count; i++)
        halves[i] = ~noise_words(sampler.place, static_cast<uint32_t>(names[from + i])).high >> 1;
    else
      for (int64_t i = 0; i < count; i++)
        halves[i] = ~noise_words(sampler.place, static_cast<uint32_t>(from + i)).high >> 1;
    // 1 - u is at least halves / 2^31, whose logarithm to base 2 is at least exponent plus mantissa.
    for (int64_t i = 0; i < count; i++) {
      const float half = static_cast<float>(static_cast<int32_t>(halves[i]));
      int32_t bits;
      std::memcpy(&bits, &half, sizeof(bits));
      const float noise = 0.693147181f * (158.0f - static_cast<float>(bits) * 0x1p-23f);
      // Finite even of forbidden tokens: nothing times -infinity, in great heat, is no number.
      bounds[i] = std::max(logits[from + i] - best, -std::numeric_limits<float>::max()) * steep + noise;
    }
    float needed = static_cast<float>(value - top) - kSlack;
    if (!(highest_of(bounds, 0, count) >= needed)) continue;
    for (int64_t i = 0; i < count; i++) {
      if (!(bounds[i] >= needed)) continue;
      const double scaled = logits[from + i] / sampler.temperature;
      if (!(scaled >= least)) continue;
      value = look(from + i, scaled);
      needed = static_cast<float>(value - top) - kSlack;
    }
  }
}

// The token that a sampler chooses, the first of equal ones, by a team.
class Draw {
 public:
  explicit Draw(int32_t threads) : tops_(threads, -INFINITY), drawn_(threads, {-INFINITY, 0}) {}

  // It waits at its end.
  void team_draw(const SamplerParams& sampler, const float* logits, int64_t size) {
    const int me = omp_get_thread_num();
    const Stretch share = share_of(size);
    tops_[me] = highest_of(logits, share.start, share.stop);
#pragma omp barrier
#pragma omp single
    {
      best_ = *std::max_element(tops_.begin(), tops_.end());
      least_ = threshold(sampler, logits, size, best_);
    }
    Drawn own = {-INFINITY, 0};
    show_candidates(sampler, logits, nullptr, share.start, share.stop, best_, least_, own.value,
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
  double least_ = kNoLeast;
};

}  // namespace
