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

inline void transpose(__m512i rows[kLanes]) {
  __m512i even[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    even[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    even[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(even[i], even[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(even[i], even[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(even[i + 1], even[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(even[i + 1], even[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    even[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    even[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    even[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    even[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    rows[i] = _mm512_shuffle_i32x4(even[i], even[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(even[i], even[i + 8], 0xdd);
  }
}

// Scores of Q queries against 16 keys, whose pairs are rows of `keys`.
template <int Q>
inline void score(const Group& group, const __m512i* keys, int64_t pairs, float* scores,
                  int64_t stride) {
  __m512 sums[Q];
  for (int q = 0; q < Q; q++) sums[q] = _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; k++)
    for (int q = 0; q < Q; q++)
      sums[q] = _mm512_dpbf16_ps(sums[q], (__m512bh)_mm512_set1_epi32(pair(group.query[q] + 2 * k)),
                                 (__m512bh)keys[k]);
  for (int q = 0; q < Q; q++) _mm512_storeu_ps(scores + q * stride, sums[q]);
}

// Sums of values, weighted, of 32 numbers of each head, slot after slot.
template <int Q>
inline void gather(const Group& group, const float* weights, int64_t stride, const bf16* value,
                   int64_t slot_stride, int64_t slots, const float* factors, int64_t offset) {
  __m512 sums[Q][2];
  for (int q = 0; q < Q; q++) sums[q][0] = sums[q][1] = _mm512_setzero_ps();
  for (int64_t s = 0; s < slots; s++) {
    const __m512 low = load(value + s * slot_stride + offset);
    const __m512 high = load(value + s * slot_stride + offset + kLanes);
    for (int q = 0; q < Q; q++) {
      const __m512 weight = _mm512_set1_ps(weights[q * stride + s]);
      sums[q][0] = _mm512_fmadd_ps(weight, low, sums[q][0]);
      sums[q][1] = _mm512_fmadd_ps(weight, high, sums[q][1]);
    }
  }
  for (int q = 0; q < Q; q++) {
    const __m512 factor = _mm512_set1_ps(factors[q]);
    store(group.out[q] + offset, _mm512_mul_ps(sums[q][0], factor));
    store(group.out[q] + offset + kLanes, _mm512_mul_ps(sums[q][1], factor));
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
  const __m512 lowest = _mm512_set1_ps(-INFINITY);
  __m512 highest = lowest;
  const auto seen = [&](int64_t s) {
    const __mmask16 inside = first(slots - s);
    if (!mask) return inside;
    const __m128i bytes = _mm_maskz_loadu_epi8(inside, mask + s);
    return static_cast<__mmask16>(_mm_test_epi8_mask(bytes, bytes));
  };
  for (int64_t s = 0; s < slots; s += kLanes)
    highest = _mm512_mask_max_ps(highest, seen(s), highest, _mm512_loadu_ps(scores + s));
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
  const __m512 factor = _mm512_set1_ps(scale);
  int64_t count = 0;
  for (int64_t s = 0; s < slots; s += kLanes) {
    const __mmask16 here = seen(s);
    const __m512 below = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + s), top), factor);
    const __m512 weights = _mm512_maskz_mov_ps(here, exponential(below));
    _mm512_storeu_ps(scores + s, weights);
    // Compressed in a register: straight to memory takes some CPUs a hundred cycles.
    _mm512_storeu_ps(visible + count, _mm512_maskz_compress_ps(here, weights));
    count += __builtin_popcount(here);
  }
  // Summed without the gaps, so that it does not matter in which slots the keys are.
  __m512 sums = _mm512_setzero_ps();
  for (int64_t s = 0; s < count; s += kLanes)
    sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(first(count - s), visible + s));
  return count ? 1.0f / _mm512_reduce_add_ps(sums) : 0.0f;
}

void attend(const Group& group, const bf16* key, const bf16* value, const Attention& call) {
  const int64_t slots = call.slots, stride = (slots + kLanes - 1) / kLanes * kLanes;
  const int64_t pairs = call.head_dim / 2;
  own_scratch.resize(std::max<size_t>(own_scratch.size(), (kQueries + 1) * stride + kLanes));
  float* scores = own_scratch.data();
  alignas(64) __m512i keys[128];
  for (int64_t s = 0; s < slots; s += kLanes) {
    for (int64_t part = 0; part < pairs; part += kLanes) {
      for (int i = 0; i < kLanes; i++)
        keys[part + i] = s + i < slots
                             ? _mm512_loadu_si512(key + (s + i) * call.key_slot + 2 * part)
                             : _mm512_setzero_si512();
      transpose(keys + part);
    }
    with_queries<Score>(group.count, group, keys, pairs, scores + s, stride);
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
