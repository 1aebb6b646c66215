// Attention of few queries, at most kQueries of a KV head at a time, over all slots.
#pragma once

#include "gemm.h"

extern "C" {

struct Attention {
  const bf16 *query, *key, *value;
  const int64_t* cache_rows;  // of each row's keys and values; null: 0, 1, ...
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

constexpr int kMostDim = 256;   // numbers of a head
constexpr int kQueries = 16;    // queries that share one read of keys and values
constexpr int kGatheredQueries = 3;  // up to this number of queries, the tile of scores is not transposed
constexpr int kNearSlots = 32;  // slots whose values all queries add up before the next slots are read

// Queries that are read together, and where their results go.
struct Group {
  const bf16* query[kQueries];
  const uint8_t* mask[kQueries];
  bf16* out[kQueries];
  int count;
};

// Adds values of some slots, weighted, to Q queries' sums of some numbers of the head.
template <int Q>
inline void gather(const float* weights, int64_t stride, const bf16* value, int64_t slot_stride,
                   int64_t slots, float* to) {
  Floats sums[Q][kGathered];
  unrolled<Q>([&](auto q) {
    unrolled<kGathered>([&](auto i) { sums[q][i] = load(to + q * kMostDim + i * kLanes); });
  });
  for (int64_t s = 0; s < slots; s++) {
    Floats numbers[kGathered];
    unrolled<kGathered>([&](auto i) { numbers[i] = load(value + s * slot_stride + i * kLanes); });
    unrolled<Q>([&](auto q) {
      const Floats weight = all(weights[q * stride + s]);
      unrolled<kGathered>([&](auto i) { sums[q][i] = multiply_add(weight, numbers[i], sums[q][i]); });
    });
  }
  unrolled<Q>([&](auto q) {
    unrolled<kGathered>([&](auto i) { store(to + q * kMostDim + i * kLanes, sums[q][i]); });
  });
}

// Fetches a head's keys or values of some slots ahead of their use.
inline void fetch(const bf16* from, int64_t slot_stride, int64_t start, int64_t stop, int64_t dim) {
  for (int64_t s = start; s < stop; s++) prefetch(from + s * slot_stride, dim * sizeof(bf16));
}

// `call` with the number of queries as a constant.
template <int Q, class Call>
inline void with_queries(int count, const Call& call) {
  if constexpr (Q > 1)
    if (count < Q) return with_queries<Q - 1>(count, call);
  call(std::integral_constant<int, Q>{});
}

// `call` with the first of as many queries as registers hold, and their number as a constant.
template <class Call>
inline void by_registers(int count, const Call& call) {
  for (int start = 0; start < count; start += kTogether)
    with_queries<kTogether>(count - start, [&](auto q) { call(start, q); });
}

#ifdef __AMX_BF16__
// Scores of a group's queries against all keys, read in their stored order: keys by queries, 16 by 16.
class Scores {
 public:
  Scores(const Group& group, int64_t dim) : group_(group), dim_(dim), tiles_(kRowsPerTile) {
    for (int64_t i = 0; i < dim; i += kBlock) {
      Words pairs[kLanes];
      for (int q = 0; q < kLanes; q++) pairs[q] = q < group.count ? words(group.query[q] + i) : no_words();
      transpose(pairs);
      for (int k = 0; k < kLanes; k++) _mm512_store_si512(queries_ + i * kLanes + 2 * k * kLanes, pairs[k]);
    }
  }

  // Against `count` keys, at most 16.
  void against(const bf16* key, int64_t key_slot, int64_t count, float* scores, int64_t stride) {
    if (count < kLanes) {  // there may be no memory behind the last key
      for (int64_t s = 0; s < kLanes; s++)
        if (s < count) std::copy_n(key + s * key_slot, dim_, last_ + s * dim_);
        else std::fill_n(last_ + s * dim_, dim_, 0);
      key = last_;
      key_slot = dim_;
    }
    tile_zero<0>();
    for (int64_t i = 0; i < dim_; i += kBlock) {
      tile_load<4>(key + i, key_slot * sizeof(bf16));
      tile_load<6>(queries_ + i * kLanes, kTileBytes);
      tile_add<0, 4, 6>();
    }
    tile_store<0>(found_, kTileBytes);
    if (group_.count > kGatheredQueries) {
      Words columns[kLanes];
      for (int s = 0; s < kLanes; s++) columns[s] = words(found_ + s * kLanes);
      transpose(columns);
      for (int q = 0; q < group_.count; q++) store(scores + q * stride, (Floats)columns[q]);
      return;
    }
    const Words places = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(kLanes));
    for (int q = 0; q < group_.count; q++)
      store(scores + q * stride, _mm512_i32gather_ps(places, found_ + q, sizeof(float)));
  }

 private:
  const Group& group_;
  const int64_t dim_;
  Tiles tiles_;
  alignas(64) bf16 queries_[kMostDim * kLanes];  // (dim / 2, 16, 2)
  alignas(64) bf16 last_[kMostDim * kLanes];     // (16, dim)
  alignas(64) float found_[kLanes * kLanes];
};
#else
// Scores of Q queries, one beside another, against 16 keys, whose pairs are a panel.
template <int Q>
inline void score(const Input* queries, const Words* keys, int64_t dim, float* scores,
                  int64_t stride) {
  const uint8_t* panel = reinterpret_cast<const uint8_t*>(keys);
  Tile tile;
  Sixteen::tile<Q, 1>(queries, dim, panel, 0, panel, dim, tile);
  for (int q = 0; q < Q; q++) store(scores + q * stride, tile.sums[q][0]);
}

// Scores of a group's queries against all keys; 16 keys at a time are transposed.
class Scores {
 public:
  Scores(const Group& group, int64_t dim) : count_(group.count), dim_(dim) {
    for (int q = 0; q < count_; q++) as_inputs(group.query[q], dim, queries_ + q * dim);
  }

  // Against `count` keys, at most 16.
  void against(const bf16* key, int64_t key_slot, int64_t count, float* scores, int64_t stride) {
    for (int64_t part = 0; part < dim_ / 2; part += kLanes) {
      for (int i = 0; i < kLanes; i++)
        keys_[part + i] = i < count ? words(key + i * key_slot + 2 * part) : no_words();
      transpose(keys_ + part);
    }
    by_registers(count_, [&](int start, auto q) {
      score<q>(queries_ + start * dim_, keys_, dim_, scores + start * stride, stride);
    });
  }

 private:
  const int count_;
  const int64_t dim_;
  alignas(64) Input queries_[kQueries * kMostDim];
  alignas(64) Words keys_[kMostDim / 2];
};
#endif

// Scores become weights, zero where nothing is visible; returns one over their sum.
float softmax_weights(float* scores, const uint8_t* mask, int64_t slots, float scale, float* visible) {
  const Floats nothing = all(-INFINITY);
  Floats most = nothing;
  const auto seen = [&](int64_t s) {
    return mask ? nonzero(mask + s, slots - s) : first(slots - s);
  };
  for (int64_t s = 0; s < slots; s += kLanes)
    most = larger(most, blend(seen(s), load(scores + s), nothing));
  const Floats top = all(reduce_max(most)), factor = all(scale);
  int64_t count = 0;
  for (int64_t s = 0; s < slots; s += kLanes) {
    const Mask here = seen(s);
    const Floats weights =
        blend(here, exponential((load(scores + s) - top) * factor), all(0.0f));
    store(scores + s, weights);
    count += compress(visible + count, here, weights);
  }
  // Summed without the gaps, so that the keys' slots do not change the sum.
  Floats sums = all(0.0f);
  for (int64_t s = 0; s < count; s += kLanes)
    sums = sums + blend(first(count - s), load(visible + s), all(0.0f));
  return count ? 1.0f / reduce_sum(sums) : 0.0f;
}

// Number of slots up to the last that a group sees: values behind it would be multiplied by zero.
inline int64_t seen_slots(const Group& group, int64_t slots) {
  if (!group.mask[0]) return slots;
  int64_t seen = 0;
  for (int q = 0; q < group.count; q++) {
    int64_t last = slots;
    while (last > seen && !group.mask[q][last - 1]) last--;
    seen = last;
  }
  return seen;
}

void attend(const Group& group, const bf16* key, const bf16* value, const Attention& call) {
  const int64_t slots = seen_slots(group, call.slots), stride = (slots + kLanes - 1) / kLanes * kLanes;
  const int64_t dim = call.head_dim;
  float* scores = own<Group, float>((kQueries + 1) * stride + kLanes);
  {
    Scores found(group, dim);
    for (int64_t s = 0; s < slots; s += kLanes) {
      fetch(key, call.key_slot, s + 2 * kLanes, std::min(slots, s + 3 * kLanes), dim);
      found.against(key + s * call.key_slot, call.key_slot, std::min<int64_t>(kLanes, slots - s), scores + s,
                    stride);
    }
  }
  float factors[kQueries];
  for (int q = 0; q < group.count; q++)
    factors[q] = softmax_weights(scores + q * stride, group.mask[q], slots, call.scale,
                        scores + kQueries * stride);
  alignas(64) float sums[kQueries * kMostDim];
  for (int q = 0; q < group.count; q++) std::fill_n(sums + q * kMostDim, dim, 0.0f);
  for (int64_t s = 0; s < slots; s += kNearSlots) {
    fetch(value, call.value_slot, s + kNearSlots, std::min(slots, s + 2 * kNearSlots), dim);
    for (int64_t offset = 0; offset < dim; offset += kGathered * kLanes)
      by_registers(group.count, [&](int start, auto q) {
        gather<q>(scores + start * stride + s, stride, value + s * call.value_slot + offset,
                  call.value_slot, std::min<int64_t>(kNearSlots, slots - s),
                  sums + start * kMostDim + offset);
      });
  }
  for (int q = 0; q < group.count; q++)
    for (int64_t i = 0; i < dim; i += kLanes)
      store(group.out[q] + i, load(sums + q * kMostDim + i) * all(factors[q]));
}

// Attention of few queries to keys and values of any strides, by a team, which waits at the
// end. A thread that has a KV head to itself reads its keys and values once for each kQueries of its
// queries; where heads cannot be dealt out evenly, the queries of those left over are parted.
inline void team_attend(const Attention& call) {
  const int64_t groups = call.heads / call.kv_heads, queries = groups * call.tokens;
  const int64_t lanes = call.rows * call.kv_heads, threads = omp_get_num_threads();
  const int64_t whole = lanes / threads * threads, parted = lanes - whole;
  const int64_t parts = parted ? std::min(queries, threads / parted) : 1;
  for (int64_t task = omp_get_thread_num(); task < whole + parted * parts; task += threads) {
    const bool all = task < whole;
    const int64_t lane = all ? task : whole + (task - whole) / parts, part = all ? 0 : (task - whole) % parts;
    const int64_t first = queries * part / parts, last = all ? queries : queries * (part + 1) / parts;
    const int64_t row = lane / call.kv_heads, kv_head = lane % call.kv_heads;
    const int64_t cache_row = call.cache_rows ? call.cache_rows[row] : row;
    Group group;
    for (int64_t start = first; start < last; start += group.count) {
      group.count = static_cast<int>(std::min<int64_t>(kQueries, last - start));
      for (int q = 0; q < group.count; q++) {
        const int64_t token = (start + q) / groups, head = kv_head * groups + (start + q) % groups;
        group.query[q] = call.query + row * call.query_row + token * call.query_token +
                         head * call.query_head;
        group.mask[q] =
            call.mask ? call.mask + row * call.mask_row + token * call.mask_token : nullptr;
        group.out[q] = call.out + ((row * call.tokens + token) * call.heads + head) * call.head_dim;
      }
      attend(group, call.key + cache_row * call.key_row + kv_head * call.key_head,
             call.value + cache_row * call.value_row + kv_head * call.value_head, call);
    }
  }
#pragma omp barrier
}

}  // namespace
