// Products, norms, rotary embeddings and attention of a decoder layer, for a few rows of bf16.
//
// A pass over a few tokens reads every weight once, so it can take no less than reading them does.
// What keeps it from that limit is the way to and from many small operations. Here a layer is two
// calls and its attention a third, or all layers are one, and sums stay in float32 until a layer's
// half is over.
//
// Every output is summed in an order that depends neither on how many rows a call has nor on the
// slot that a key is stored in. So a token's numbers are the same bits in a pass over one token, a
// chain or a tree.
//
// Legend: see products.h.

#include <vector>

#include "attention.h"
#include "noise.h"
#include "products.h"
#ifdef __AVX512BF16__
#include "codes.h"
#endif

extern "C" {

struct Layer {
  Matrix read;    // query, key and value
  Matrix output;  // of the attention
  Matrix inner;   // gate and up
  Matrix down;
  const bf16* norm;       // before `read`
  const bf16* inner_norm; // before `inner`
  const bf16* query_norm; // of each head, or null
  const bf16* key_norm;
  float eps;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
};

// A pass of all layers over tokens whose keys and values are stored in one tensor,
// (layers, 2, places, J, slots, D).
struct Pass {
  const float *cos, *sin;
  int64_t turned;
  bf16* cache;               // of the pass's first layer
  int64_t layer, half, place, head;  // strides, in numbers
  const int64_t* starts;     // the slot of each row's first token
  Attention attention;       // but for query, key, value and out
  const bf16* norm;          // behind the last layer, or null
  float eps;                 // of that norm
};

// A drafter that reads text by one layer, and each token that it drafts behind by another one as well,
// over its memory.
struct Chain {
  const Layer *text, *memory;
  Pass text_pass, memory_pass;  // of the unread text, of its last token; angles of drafts follow theirs
  const Matrix* head;
  const int64_t* names;    // of the head's outputs, as rows of `embeddings`
  const bf16* embeddings;  // (vocabulary, E)
  int64_t width;           // E
};

// What becomes of a token's keys and values in all layers, until a drafter can attend to it.
struct Encoder {
  const Layer* layer;        // over the layers of one token
  const float *cos, *sin;    // (layers, turned)
  int64_t turned;
  int64_t layers;
  float scale;               // of the scores
  const Matrix* projection;  // of the mean over layers
  const Layer* memory;       // keys and values alone
};

}  // extern "C"

namespace {

// RMSNorm of n numbers, a multiple of 16.
template <class Read>
inline void normalise(const Read& read, const bf16* weight, float eps, int64_t n, bf16* out) {
  Floats squares = all(0.0f);
  for (int64_t i = 0; i < n; i += kLanes) squares = multiply_add(read(i), read(i), squares);
  const float mean = total(squares) / static_cast<float>(n);
  const Floats factor = all(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, read(i) * factor * load(weight + i));
}

// Rotary embedding of one head: the first `turned` numbers, halves against each other.
inline void rotate(const float* x, const float* cos, const float* sin, int64_t turned, int64_t dim,
                   bf16* out) {
  const int64_t half = turned / 2;
  for (int64_t i = 0; i < half; i++) {
    out[i] = rounded(x[i] * cos[i] - x[i + half] * sin[i]);
    out[i + half] = rounded(x[i + half] * cos[i + half] + x[i] * sin[i + half]);
  }
  for (int64_t i = turned; i < dim; i++) out[i] = rounded(x[i]);
}

inline void rotate_fast(const float* x, const float* cos, const float* sin, int64_t half, bf16* out) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const Floats a = load(x + i), b = load(x + i + half);
    store(out + i, subtract_product(b, load(sin + i), a * load(cos + i)));
    store(out + i + half, multiply_add(a, load(sin + i + half), b * load(cos + i + half)));
  }
}

}  // namespace

extern "C" {

// out = x times the transposed weight, plus the bias; (rows, outputs), contiguous.
void moaspec_product(const Matrix* matrix, const bf16* x, int64_t rows, int64_t stride, void* out,
                     int32_t single, int32_t threads) {
  const int64_t outputs = matrix->outputs;
#pragma omp parallel num_threads(threads)
  multiply(*matrix, x, rows, stride, [&](int64_t row, int64_t output, Floats sums) {
    const int64_t place = row * outputs + output;
    if (single)
      store(static_cast<float*>(out) + place, sums, outputs - output);
    else
      store(static_cast<bf16*>(out) + place, sums, outputs - output);
  });
}

// For each row the index of its largest output, the first of equal ones.
void moaspec_best(const Matrix* matrix, const bf16* x, int64_t rows, int64_t stride, int64_t* out,
                  int32_t threads) {
  // Every lane of every thread keeps its own best, and where that was.
  const int64_t lanes = rows * kLanes;
  std::vector<float> tops(threads * lanes, -INFINITY);
  std::vector<int32_t> places(threads * lanes, 0);
#pragma omp parallel num_threads(threads)
  {
    float* own_tops = tops.data() + omp_get_thread_num() * lanes;
    int32_t* own_places = places.data() + omp_get_thread_num() * lanes;
    multiply(*matrix, x, rows, stride, [&](int64_t row, int64_t output, Floats sums) {
      sums = chosen(first(matrix->outputs - output), sums, all(-INFINITY));
      const Floats top = load(own_tops + row * kLanes);
      const Mask better = less(top, sums);
      store(own_tops + row * kLanes, chosen(better, sums, top));
      put(own_places + row * kLanes, better, static_cast<int32_t>(output));
    });
  }
  for (int64_t row = 0; row < rows; row++) {
    float top = -INFINITY;
    int64_t best = 0;
    for (int64_t i = 0; i < threads * kLanes; i++) {
      const int64_t lane = i / kLanes * lanes + row * kLanes + i % kLanes;
      const int64_t place = places[lane] + i % kLanes;
      if (tops[lane] > top || (tops[lane] == top && place < best)) {
        top = tops[lane];
        best = place;
      }
    }
    out[row] = best;
  }
}

// RMSNorm of each row; `out` may be `x`.
void moaspec_norm(const bf16* x, const bf16* weight, float eps, int64_t rows, int64_t width, bf16* out,
                  int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > kChunkRows)
  for (int64_t row = 0; row < rows; row++) {
    const bf16* from = x + row * width;
    normalise([&](int64_t i) { return load(from + i); }, weight, eps, width, out + row * width);
  }
}

// Norm, products, norms of heads and rotary embeddings: (rows, H + 2 J, D), contiguous.
// Cosines and sines are (period, turned), those of row 0, 1, ... and again from the start.
void moaspec_project(const Layer* layer, const bf16* x, int64_t rows, const float* cos,
                     const float* sin, int64_t turned, int64_t period, bf16* out,
                     int32_t threads) {
  const int64_t width = layer->read.inputs, dim = layer->head_dim;
  const int64_t heads = layer->heads + 2 * layer->kv_heads, turning = heads - layer->kv_heads;
  for (int64_t start = 0; start < rows; start += kChunkRows) {
    const int64_t count = std::min<int64_t>(kChunkRows, rows - start);
    bf16* normed = scratch.bf16s(count * width);
    float* joined = scratch.floats(0, count * layer->read.outputs);
#pragma omp parallel num_threads(threads)
    {
      const Share own(count);
      for (int64_t row = own.start; row < own.stop; row++) {
        const bf16* from = x + (start + row) * width;
        normalise([&](int64_t i) { return load(from + i); }, layer->norm, layer->eps, width,
                  normed + row * width);
      }
#pragma omp barrier
      multiply(layer->read, normed, count, width, [&](int64_t row, int64_t output, Floats sums) {
        store(joined + row * heads * dim + output, sums);
      });
#pragma omp barrier
      const Share share(count * heads);
      for (int64_t i = share.start; i < share.stop; i++) {
        const int64_t row = i / heads, head = i % heads;
        float* from = joined + i * dim;
        bf16* to = out + (start * heads + i) * dim;
        const bf16* weight = head < layer->heads ? layer->query_norm : layer->key_norm;
        if (weight && head < turning) {
          normalise([&](int64_t k) { return load(from + k); }, weight, layer->eps, dim, to);
          for (int64_t k = 0; k < dim; k += kLanes) store(from + k, load(to + k));
        }
        const float* c = cos + (start + row) % period * turned;
        const float* s = sin + (start + row) % period * turned;
        const int64_t angles = head < turning ? turned : 0;
        if (angles == dim && dim % (2 * kLanes) == 0)
          rotate_fast(from, c, s, dim / 2, to);
        else
          rotate(from, c, s, angles, dim, to);
      }
    }
  }
}

// Output projection, residual, norm, gated MLP, residual: the mean of each `group` rows,
// (rows / group, E). The last projection is linear, so it follows the mean.
void moaspec_finish(const Layer* layer, const bf16* x, const bf16* read, int64_t rows,
                    int64_t group, bf16* out, int32_t threads) {
  const int64_t width = layer->output.outputs, inner = layer->inner.outputs / 2;
  const int64_t read_width = layer->output.inputs;
  const int64_t chunk = std::max<int64_t>(1, kChunkRows / group) * group;
  const Floats share_of_row = all(1.0f / static_cast<float>(group));
  for (int64_t start = 0; start < rows; start += chunk) {
    const int64_t count = std::min<int64_t>(chunk, rows - start), means = count / group;
    const bf16* from = x + start * width;
    float* middle = scratch.floats(1, count * width);
    float* both = scratch.floats(2, count * 2 * inner);
    bf16* halves = scratch.bf16s(count * std::max(width, inner));
#pragma omp parallel num_threads(threads)
    {
      multiply(layer->output, read + start * read_width, count, read_width,
               [&](int64_t row, int64_t output, Floats sums) {
                 const int64_t place = row * width + output;
                 store(middle + place, load(from + place) + sums);
               });
#pragma omp barrier
      const Share own(count);
      for (int64_t row = own.start; row < own.stop; row++)
        normalise([&](int64_t i) { return load(middle + row * width + i); }, layer->inner_norm,
                  layer->eps, width, halves + row * width);
#pragma omp barrier
      multiply(layer->inner, halves, count, width, [&](int64_t row, int64_t output, Floats sums) {
        store(both + row * 2 * inner + output, sums);
      });
#pragma omp barrier
      const Share share(means * inner / kLanes);
      for (int64_t i = share.start; i < share.stop; i++) {
        const int64_t mean = i * kLanes / inner, column = i * kLanes % inner;
        Floats sums = all(0.0f);
        for (int64_t row = mean * group; row < (mean + 1) * group; row++) {
          const float* gate = both + row * 2 * inner + column;
          sums = multiply_add(silu(load(gate)), load(gate + inner), sums);
        }
        store(halves + i * kLanes, sums * share_of_row);
      }
#pragma omp barrier
      multiply(layer->down, halves, means, inner, [&](int64_t mean, int64_t output, Floats sums) {
        Floats residual = all(0.0f);
        for (int64_t row = mean * group; row < (mean + 1) * group; row++)
          residual = residual + load(middle + row * width + output);
        store(out + (start / group + mean) * width + output,
              multiply_add(residual, share_of_row, sums));
      });
    }
  }
}

// Attention of few queries to keys and values wherever they are stored.
void moaspec_attend(const Attention* call, int32_t threads) {
  const int64_t groups = call->heads / call->kv_heads, queries = groups * call->tokens;
  // Enough parts for all threads, each of at most kQueries queries.
  const int64_t lanes = call->rows * call->kv_heads;
  const int64_t wanted = std::max<int64_t>((queries + kQueries - 1) / kQueries,
                                           (2 * threads + lanes - 1) / lanes);
  const int64_t size = (queries + std::min(wanted, queries) - 1) / std::min(wanted, queries);
  const int64_t parts = (queries + size - 1) / size;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t task = 0; task < lanes * parts; task++) {
    const int64_t row = task / parts / call->kv_heads, kv_head = task / parts % call->kv_heads;
    const int64_t place = call->places ? call->places[row] : row, start = task % parts * size;
    Group group;
    group.count = static_cast<int>(std::min(size, queries - start));
    for (int q = 0; q < group.count; q++) {
      const int64_t token = (start + q) / groups, head = kv_head * groups + (start + q) % groups;
      group.query[q] = call->query + row * call->query_row + token * call->query_token +
                       head * call->query_head;
      group.mask[q] =
          call->mask ? call->mask + row * call->mask_row + token * call->mask_token : nullptr;
      group.out[q] =
          call->out + ((row * call->tokens + token) * call->heads + head) * call->head_dim;
    }
    attend(group, call->key + place * call->key_row + kv_head * call->key_head,
           call->value + place * call->value_row + kv_head * call->value_head, *call);
  }
}

// All layers and the norm behind them, in place: x is (B * T, E).
void moaspec_stack(const Layer* layers, int64_t count, const Pass* pass, bf16* x,
                   int32_t threads) {
  Attention call = pass->attention;
  const int64_t dim = call.head_dim, tokens = call.tokens, rows = call.rows * tokens;
  const int64_t stored = layers->kv_heads, heads = call.heads + 2 * stored;
  std::vector<bf16> turned(rows * heads * dim), read(rows * call.heads * dim);
  call.query = turned.data();
  call.query_head = dim;
  call.query_token = heads * dim;
  call.query_row = tokens * call.query_token;
  call.out = read.data();
  for (int64_t i = 0; i < count; i++) {
    moaspec_project(layers + i, x, rows, pass->cos, pass->sin, pass->turned, rows, turned.data(),
                    threads);
    bf16* keys = pass->cache + i * pass->layer;
    for (int64_t row = 0; row < rows; row++) {
      const int64_t slot = pass->starts[row / tokens] + row % tokens;
      for (int64_t head = 0; head < 2 * stored; head++) {
        bf16* to = keys + head / stored * pass->half + call.places[row / tokens] * pass->place +
                   head % stored * pass->head + slot * dim;
        std::copy_n(turned.data() + (row * heads + call.heads + head) * dim, dim, to);
      }
    }
    call.key = keys;
    call.value = keys + pass->half;
    moaspec_attend(&call, threads);
    moaspec_finish(layers + i, x, read.data(), rows, 1, x, threads);
  }
  const int64_t width = layers->output.outputs;
  if (pass->norm) moaspec_norm(x, pass->norm, pass->eps, rows, width, x, threads);
}

// Reads unread text, the last token of which is the root of `count` drafts: the best token after it,
// the best one after that, and so on.
void moaspec_chain(const Chain* chain, const int64_t* unread, int64_t tokens, int64_t count,
                   int64_t* out, int32_t threads) {
  const int64_t width = chain->width, start = *chain->text_pass.starts;
  std::vector<bf16> x(tokens * width);
  for (int64_t i = 0; i < tokens; i++)
    std::copy_n(chain->embeddings + unread[i] * width, width, x.data() + i * width);
  // Each of the unread tokens sees those before it, and itself.
  const int64_t visible = start + tokens;
  std::vector<uint8_t> mask(tokens * visible, 0);
  for (int64_t i = 0; i < tokens; i++) std::fill_n(mask.data() + i * visible, start + i + 1, 1);
  Pass text = chain->text_pass, memory = chain->memory_pass;
  text.attention.tokens = tokens;
  text.attention.slots = visible;
  text.attention.mask = mask.data();
  text.attention.mask_token = visible;
  moaspec_stack(chain->text, 1, &text, x.data(), threads);
  bf16* root = x.data() + (tokens - 1) * width;
  text.cos += (tokens - 1) * text.turned;
  text.sin += (tokens - 1) * text.turned;
  text.attention.tokens = 1;
  text.attention.mask = nullptr;
  for (int64_t i = 0; i < count; i++) {
    if (i > 0) {
      std::copy_n(chain->embeddings + out[i - 1] * width, width, root);
      const int64_t slot = visible + i - 1;
      text.starts = &slot;
      text.attention.slots = slot + 1;
      for (Pass* pass : {&text, &memory}) {
        pass->cos += pass->turned;
        pass->sin += pass->turned;
      }
      moaspec_stack(chain->text, 1, &text, root, threads);
    }
    moaspec_stack(chain->memory, 1, &memory, root, threads);
    moaspec_best(chain->head, root, 1, width, out + i, threads);
    out[i] = chain->names[out[i]];
  }
}

// The bits of positional noise: of `count` tokens at each place, (places, count). The first token of
// a place is `stride` numbers behind that of the one before.
void moaspec_noise(const Place* places, int64_t num, const int64_t* tokens, int64_t stride,
                   int64_t count, int64_t* out, int32_t threads) {
  if (num * count < threads * kNoiseShare) threads = 1;
#pragma omp parallel for collapse(2) num_threads(threads)
  for (int64_t i = 0; i < num; i++)
    for (int64_t start = 0; start < count; start += kNoiseShare) {
      const Place place = places[i];
      const int64_t* from = tokens + i * stride;
      int64_t* to = out + i * count;
      const int64_t stop = std::min(count, start + kNoiseShare);
      for (int64_t k = start; k < stop; k++)
        to[k] = noise_bits(place, static_cast<uint32_t>(from[k]));
    }
}

// Keys and values of all layers, (tokens, L, K), as what a drafter attends to, (tokens, 2 J, D).
void moaspec_encode(const Encoder* encoder, const bf16* x, int64_t tokens, const float* cos,
                    const float* sin, int64_t turned, bf16* out, int32_t threads) {
  const Layer *layer = encoder->layer, *memory = encoder->memory;
  const int64_t layers = encoder->layers, dim = layer->head_dim, width = layer->read.inputs;
  const int64_t heads = layer->heads + 2 * layer->kv_heads;
  const int64_t states = encoder->projection->outputs, given = 2 * memory->kv_heads * memory->head_dim;
  const int64_t most = std::min(tokens, kEncodedTokens);
  std::vector<bf16> asked(most * layers * heads * dim), read(most * layers * layer->heads * dim);
  std::vector<bf16> means(most * width), projected(most * states);
  Attention call = {};
  call.query = asked.data();
  call.key = call.query + layer->heads * dim;
  call.value = call.key + layer->kv_heads * dim;
  call.out = read.data();
  call.tokens = call.slots = layers;
  call.heads = layer->heads;
  call.kv_heads = layer->kv_heads;
  call.head_dim = dim;
  call.query_head = call.key_head = call.value_head = dim;
  call.query_token = call.key_slot = call.value_slot = heads * dim;
  call.query_row = call.key_row = call.value_row = layers * heads * dim;
  call.scale = encoder->scale;
  for (int64_t start = 0; start < tokens; start += most) {
    const int64_t count = std::min(most, tokens - start), rows = count * layers;
    const bf16* from = x + start * layers * width;
    moaspec_project(layer, from, rows, encoder->cos, encoder->sin, encoder->turned, layers,
                    asked.data(), threads);
    call.rows = count;
    moaspec_attend(&call, threads);
    moaspec_finish(layer, from, read.data(), rows, layers, means.data(), threads);
    moaspec_product(encoder->projection, means.data(), count, width, projected.data(), 0, threads);
    moaspec_project(memory, projected.data(), count, cos + start * turned, sin + start * turned,
                    turned, count, out + start * given, threads);
  }
}

}  // extern "C"
