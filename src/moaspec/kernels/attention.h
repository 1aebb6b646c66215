// Attention of the queries of one KV head, at most kQueries, over all slots.
#pragma once

#include "products.h"

extern "C" {

struct Attention {
  const bf16 *query, *key, *value;
  const int64_t* places;  // of each row's keys and values; null: 0, 1, ...
  const uint8_t* mask;    // 1: visible; null: everything is
  bf16* out;            // (B, T, H, D), contiguous
  int64_t rows, tokens, heads, kv_heads, head_dim, slots;
  int64_t query_row, query_token, query_head;  // strides, in numbers
  int64_t key_row, key_head, key_slot;
  int64_t value_row, value_head, value_slot;
  int64_t mask_row, mask_token;
  float scale;
};

}  // extern "C"

namespace {

// The queries of one KV head, at most kQueries, over all slots.
struct Group {
  const bf16* query[kQueries];
  const uint8_t* mask[kQueries];
  bf16* out[kQueries];
  int count;
};

// Scores of Q queries against 16 keys, whose pairs are rows of `keys`.
template <int Q>
inline void score(const Group& group, const Words* keys, int64_t count, float* scores,
                  int64_t stride) {
  Floats sums[Q];
  for (int q = 0; q < Q; q++) sums[q] = all(0.0f);
  for (int64_t k = 0; k < count; k++) {
    const Pairs both = pairs(keys[k]);
    for (int q = 0; q < Q; q++) sums[q] = multiply_add(pair(group.query[q] + 2 * k), both, sums[q]);
  }
  for (int q = 0; q < Q; q++) store(scores + q * stride, sums[q]);
}

// Sums of values, weighted, of 32 numbers of each head, slot after slot.
template <int Q>
inline void gather(const Group& group, const float* weights, int64_t stride, const bf16* value,
                   int64_t slot_stride, int64_t slots, const float* factors, int64_t offset) {
  Floats sums[Q][2];
  for (int q = 0; q < Q; q++) sums[q][0] = sums[q][1] = all(0.0f);
  for (int64_t s = 0; s < slots; s++) {
    const Floats low = load(value + s * slot_stride + offset);
    const Floats high = load(value + s * slot_stride + offset + kLanes);
    for (int q = 0; q < Q; q++) {
      const Floats weight = all(weights[q * stride + s]);
      sums[q][0] = multiply_add(weight, low, sums[q][0]);
      sums[q][1] = multiply_add(weight, high, sums[q][1]);
    }
  }
  for (int q = 0; q < Q; q++) {
    store(group.out[q] + offset, sums[q][0] * all(factors[q]));
    store(group.out[q] + offset + kLanes, sums[q][1] * all(factors[q]));
  }
}

template <template <int> class Call, class... Rest>
inline void with_queries(int count, Rest&&... rest) {
  switch (count) {
    case 8: return Call<8>::run(rest...);
    case 7: return Call<7>::run(rest...);
    case 6: return Call<6>::run(rest...);
    case 5: return Call<5>::run(rest...);
    case 4: return Call<4>::run(rest...);
    case 3: return Call<3>::run(rest...);
    case 2: return Call<2>::run(rest...);
    default: return Call<1>::run(rest...);
  }
}

template <int Q>
struct Score {
  template <class... Rest>
  static void run(Rest&&... rest) { score<Q>(rest...); }
};

template <int Q>
struct Gather {
  template <class... Rest>
  static void run(Rest&&... rest) { gather<Q>(rest...); }
};

// Scores become weights, zero where nothing is visible; returns one over their sum.
float soften(float* scores, const uint8_t* mask, int64_t slots, float scale, float* visible) {
  const Floats nothing = all(-INFINITY);
  Floats most = nothing;
  const auto seen = [&](int64_t s) {
    return mask ? nonzero(mask + s, slots - s) : first(slots - s);
  };
  for (int64_t s = 0; s < slots; s += kLanes)
    most = larger(most, chosen(seen(s), load(scores + s), nothing));
  const Floats top = all(highest(most)), factor = all(scale);
  int64_t count = 0;
  for (int64_t s = 0; s < slots; s += kLanes) {
    const Mask here = seen(s);
    const Floats weights =
        chosen(here, exponential((load(scores + s) - top) * factor), all(0.0f));
    store(scores + s, weights);
    count += squeeze(visible + count, here, weights);
  }
  // Summed without the gaps, so that it does not matter in which slots the keys are.
  Floats sums = all(0.0f);
  for (int64_t s = 0; s < count; s += kLanes)
    sums = sums + chosen(first(count - s), load(visible + s), all(0.0f));
  return count ? 1.0f / total(sums) : 0.0f;
}

void attend(const Group& group, const bf16* key, const bf16* value, const Attention& call) {
  const int64_t slots = call.slots, stride = (slots + kLanes - 1) / kLanes * kLanes;
  const int64_t count = call.head_dim / 2;
  own_scratch.resize(std::max<size_t>(own_scratch.size(), (kQueries + 1) * stride + kLanes));
  float* scores = own_scratch.data();
  alignas(64) Words keys[128];
  for (int64_t s = 0; s < slots; s += kLanes) {
    for (int64_t part = 0; part < count; part += kLanes) {
      for (int i = 0; i < kLanes; i++)
        keys[part + i] =
            s + i < slots ? words(key + (s + i) * call.key_slot + 2 * part) : no_words();
      transpose(keys + part);
    }
    with_queries<Score>(group.count, group, keys, count, scores + s, stride);
  }
  float factors[kQueries];
  for (int q = 0; q < group.count; q++)
    factors[q] = soften(scores + q * stride, group.mask[q], slots, call.scale,
                        scores + kQueries * stride);
  for (int64_t offset = 0; offset < call.head_dim; offset += 2 * kLanes)
    with_queries<Gather>(group.count, group, scores, stride, value, call.value_slot, slots, factors,
                         offset);
}

}  // namespace
