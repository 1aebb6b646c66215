// Attention of a few queries: up to kQueries queries of a KV head share one read of its keys and values.
#pragma once

#include <cstring>

#include "gemm.h"

extern "C" {

struct Attention {
  const bf16 *query, *key, *value;
  const int64_t* cache_rows;  // the cache row of each row's keys and values; null: 0, 1, ...
  const uint8_t* mask;  // 1: visible; null: all slots are
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

constexpr int kMaxHeadDim = 256;       // numbers of a head, at most
constexpr int kQueries = 16;           // queries that share one read of keys and values
constexpr int kMaxGatherQueries = 3;  // with more queries, a tile of scores is transposed, not gathered
constexpr int kValueSlots = 32;        // slots whose values all queries accumulate before the next are read

// Queries of one KV head that share its reads, their masks, and where their outputs are written.
struct QueryGroup {
  const bf16* query[kQueries];
  const uint8_t* mask[kQueries];
  bf16* out[kQueries];
  int count;
};

// Adds the weighted values of `slots` slots to the sums of Q queries, for kValueRegisters * 16 numbers of the
// head. Rows of `weights` are `stride` numbers apart, rows of sums (`to`) kMaxHeadDim.
template <int Q>
inline void accumulate_values(const float* weights, int64_t stride, const bf16* value, int64_t slot_stride,
                              int64_t slots, float* to) {
  Floats sums[Q][kValueRegisters];
  unrolled<Q>([&](auto q) {
    unrolled<kValueRegisters>([&](auto i) { sums[q][i] = load(to + q * kMaxHeadDim + i * kLanes); });
  });
  for (int64_t s = 0; s < slots; s++) {
    Floats numbers[kValueRegisters];
    unrolled<kValueRegisters>([&](auto i) { numbers[i] = load(value + s * slot_stride + i * kLanes); });
    unrolled<Q>([&](auto q) {
      const Floats weight = broadcast(weights[q * stride + s]);
      unrolled<kValueRegisters>([&](auto i) { sums[q][i] = multiply_add(weight, numbers[i], sums[q][i]); });
    });
  }
  unrolled<Q>([&](auto q) {
    unrolled<kValueRegisters>([&](auto i) { store(to + q * kMaxHeadDim + i * kLanes, sums[q][i]); });
  });
}

// Prefetches a head's keys or values in slots `start` to `stop` - 1.
inline void prefetch_slots(const bf16* from, int64_t slot_stride, int64_t start, int64_t stop, int64_t dim) {
  for (int64_t s = start; s < stop; s++) prefetch(from + s * slot_stride, dim * sizeof(bf16));
}

// Calls `call` with the number of queries, at most Q, as a constant.
template <int Q, class Call>
inline void with_queries(int count, const Call& call) {
  if constexpr (Q > 1)
    if (count < Q) return with_queries<Q - 1>(count, call);
  call(std::integral_constant<int, Q>{});
}

// Calls call(first query, their number as a constant) for groups of queries whose sums fit in registers.
template <class Call>
inline void by_register_groups(int count, const Call& call) {
  for (int start = 0; start < count; start += kRegisterQueries)
    with_queries<kRegisterQueries>(count - start, [&](auto q) { call(start, q); });
}

#ifdef __AMX_BF16__
// Computes scores of a group's queries with 16 keys at a time. Keys are the left factor, so tiles load them
// as stored.
class KeyScorer {
 public:
  static int64_t num_keys() { return kLanes; }

  KeyScorer(const QueryGroup& group, int64_t dim) : group_(group), dim_(dim), tiles_(kAmxTileRows) {
    for (int64_t i = 0; i < dim; i += kBlock) {
      Words pairs[kLanes];
      for (int q = 0; q < kLanes; q++) pairs[q] = q < group.count ? words(group.query[q] + i) : zero_words();
      transpose(pairs);
      for (int k = 0; k < kLanes; k++) _mm512_store_si512(queries_ + i * kLanes + 2 * k * kLanes, pairs[k]);
    }
  }

  // Scores of `count` keys, at most 16, `key_slot` numbers apart. Writes 16 for each query, 0 after the last
  // key, in rows that are `stride` apart.
  void compute(const bf16* key, int64_t key_slot, int64_t count, float* scores, int64_t stride) {
    if (count < kLanes) {  // a tile would read past the last key
      for (int64_t s = 0; s < kLanes; s++)
        if (s < count) std::copy_n(key + s * key_slot, dim_, padded_keys_ + s * dim_);
        else std::fill_n(padded_keys_ + s * dim_, dim_, 0);
      key = padded_keys_;
      key_slot = dim_;
    }
    tile_zero<0>();
    for (int64_t i = 0; i < dim_; i += kBlock) {
      tile_load<4>(key + i, key_slot * sizeof(bf16));
      tile_load<6>(queries_ + i * kLanes, kAmxRowBytes);
      tile_add<0, 4, 6>();
    }
    tile_store<0>(tile_scores_, kAmxRowBytes);
    if (group_.count > kMaxGatherQueries) {
      Words columns[kLanes];
      for (int s = 0; s < kLanes; s++) columns[s] = words(tile_scores_ + s * kLanes);
      transpose(columns);
      for (int q = 0; q < group_.count; q++) store(scores + q * stride, (Floats)columns[q]);
      return;
    }
    const Words column_offsets = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(kLanes));
    for (int q = 0; q < group_.count; q++)
      store(scores + q * stride, _mm512_i32gather_ps(column_offsets, tile_scores_ + q, sizeof(float)));
  }

 private:
  const QueryGroup& group_;
  const int64_t dim_;
  AmxTileConfig tiles_;
  alignas(64) bf16 queries_[kMaxHeadDim * kLanes];      // (dim / 2, 16, 2)
  alignas(64) bf16 padded_keys_[kMaxHeadDim * kLanes];  // (16, dim)
  alignas(64) float tile_scores_[kLanes * kLanes];
};
#else
// Computes scores of a group's queries with a few panels of keys at a time, which it transposes: keys are a
// panel's outputs.
class KeyScorer {
 public:
  KeyScorer(const QueryGroup& group, int64_t dim) : count_(group.count), dim_(dim), panel_(dim / 2) {
    for (int q = 0; q < count_; q++) as_inputs(group.query[q], dim, queries_ + q * dim);
  }

  int64_t num_keys() const { return Bf16Weights::panels_at_once(count_) * kLanes; }

  // Scores of `count` keys, at most `num_keys`, `key_slot` numbers apart. Writes a multiple of 16 for each query,
  // 0 after the last key, in rows that are `stride` apart.
  void compute(const bf16* key, int64_t key_slot, int64_t count, float* scores, int64_t stride) {
    int panels = 0;
    for (; panels * kLanes < count; panels++)
      for (int64_t part = 0; part < panel_; part += kLanes) {
        Words* const to = keys_ + panels * panel_ + part;
        for (int i = 0; i < kLanes; i++) {
          const int64_t slot = panels * kLanes + i;
          to[i] = slot < count ? words(key + slot * key_slot + 2 * part) : zero_words();
        }
        transpose(to);
      }
    const uint8_t* const first = reinterpret_cast<const uint8_t*>(keys_);
    multiply_panels(Bf16Weights(), queries_, count_, dim_, first, panels, panel_ * sizeof(Words), first, dim_,
                    [&](int64_t query, int panel, Floats sums) {
                      store(scores + query * stride + panel * kLanes, sums);
                    });
  }

 private:
  const int count_;
  const int64_t dim_, panel_;
  alignas(64) Input queries_[kQueries * kMaxHeadDim];
  alignas(64) Words keys_[kMaxPanels * kMaxHeadDim / 2];
};
#endif

// Replaces the scores of a query by e^(scale * (score - largest)), 0 where masked. Returns 1 / their sum, 0
// if all are masked. `visible_weights` is scratch memory for the weights behind the first gap.
float softmax_weights(float* scores, const uint8_t* mask, int64_t slots, float scale,
                      float* visible_weights) {
  const Floats minus_infinity = broadcast(-INFINITY);
  Floats maxima = minus_infinity;
  const auto visible_lanes = [&](int64_t s) {
    return mask ? nonzero(mask + s, slots - s) : first_lanes(slots - s);
  };
  for (int64_t s = 0; s < slots; s += kLanes)
    maxima = maximum(maxima, blend(visible_lanes(s), load(scores + s), minus_infinity));
  const Floats largest = broadcast(reduce_max(maxima)), factor = broadcast(scale);
  // Visible weights are summed without gaps, so that the sum does not depend on the slots of keys. Those before
  // the first gap are added at once.
  Floats sums = broadcast(0.0f);
  bool gap = false;
  int64_t count = 0;
  for (int64_t s = 0; s < slots; s += kLanes) {
    const Mask lanes = visible_lanes(s);
    const Floats weights =
        blend(lanes, exponential((load(scores + s) - largest) * factor), broadcast(0.0f));
    store(scores + s, weights);
    gap = gap || !all(lanes);
    if (gap)
      count += compress(visible_weights + count, lanes, weights);
    else
      sums = sums + weights;
  }
  for (int64_t s = 0; s < count; s += kLanes)
    sums = sums + blend(first_lanes(count - s), load(visible_weights + s), broadcast(0.0f));
  const float sum = reduce_sum(sums);
  return sum == 0.0f ? 0.0f : 1.0f / sum;
}

// Number of slots up to the last that a group sees. The weights of later slots are 0.
inline int64_t visible_slots(const QueryGroup& group, int64_t slots) {
  if (!group.mask[0]) return slots;
  int64_t end = 0;
  for (int q = 0; q < group.count; q++)
    if (const void* last = memrchr(group.mask[q] + end, 1, slots - end))
      end = static_cast<const uint8_t*>(last) - group.mask[q] + 1;
  return end;
}

// Attention of a group to the slots that it sees.
void attend(const QueryGroup& group, const bf16* key, const bf16* value, const Attention& call) {
  const int64_t slots = visible_slots(group, call.slots), stride = (slots + kLanes - 1) / kLanes * kLanes;
  const int64_t dim = call.head_dim;
  float* scores = thread_buffer<QueryGroup, float>((kQueries + 1) * stride + kLanes);
  {
    KeyScorer scorer(group, dim);
    const int64_t step = scorer.num_keys();
    for (int64_t s = 0; s < slots; s += step) {
      prefetch_slots(key, call.key_slot, s + 2 * step, std::min(slots, s + 3 * step), dim);
      scorer.compute(key + s * call.key_slot, call.key_slot, std::min(step, slots - s), scores + s, stride);
    }
  }
  float factors[kQueries];
  for (int q = 0; q < group.count; q++)
    factors[q] = softmax_weights(scores + q * stride, group.mask[q], slots, call.scale,
                                 scores + kQueries * stride);
  alignas(64) float sums[kQueries * kMaxHeadDim];
  for (int q = 0; q < group.count; q++) std::fill_n(sums + q * kMaxHeadDim, dim, 0.0f);
  for (int64_t s = 0; s < slots; s += kValueSlots) {
    prefetch_slots(value, call.value_slot, s + kValueSlots, std::min(slots, s + 2 * kValueSlots), dim);
    for (int64_t offset = 0; offset < dim; offset += kValueRegisters * kLanes)
      by_register_groups(group.count, [&](int start, auto q) {
        accumulate_values<q>(scores + start * stride + s, stride, value + s * call.value_slot + offset,
                             call.value_slot, std::min<int64_t>(kValueSlots, slots - s),
                             sums + start * kMaxHeadDim + offset);
      });
  }
  for (int q = 0; q < group.count; q++)
    for (int64_t i = 0; i < dim; i += kLanes)
      store(group.out[q] + i, load(sums + q * kMaxHeadDim + i) * broadcast(factors[q]));
}

// Attention by a team, with a barrier at its end. A KV task is one KV head of one row. All threads compute
// the same number of whole tasks, and read keys and values once for each kQueries queries of a task. The
// `split` tasks that remain are divided among the threads by their queries.
inline void team_attend(const Attention& call) {
  const int64_t group_size = call.heads / call.kv_heads, queries = group_size * call.tokens;
  const int64_t tasks = call.rows * call.kv_heads, threads = omp_get_num_threads();
  const int64_t whole = tasks / threads * threads, split = tasks - whole;
  const int64_t parts = split ? std::min(queries, threads / split) : 1;
  for (int64_t task = omp_get_thread_num(); task < whole + split * parts; task += threads) {
    const bool is_whole = task < whole;
    const int64_t kv_task = is_whole ? task : whole + (task - whole) / parts,
                  part = is_whole ? 0 : (task - whole) % parts;
    const int64_t first = queries * part / parts, last = is_whole ? queries : queries * (part + 1) / parts;
    const int64_t row = kv_task / call.kv_heads, kv_head = kv_task % call.kv_heads;
    const int64_t cache_row = call.cache_rows ? call.cache_rows[row] : row;
    QueryGroup group;
    for (int64_t start = first; start < last; start += group.count) {
      group.count = static_cast<int>(std::min<int64_t>(kQueries, last - start));
      for (int q = 0; q < group.count; q++) {
        const int64_t token = (start + q) / group_size,
                      head = kv_head * group_size + (start + q) % group_size;
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
