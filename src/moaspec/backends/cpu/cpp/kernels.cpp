// Products, norms, rotary embeddings and attention of a decoder layer, for a few rows of bf16.
//
// README.md says why, and how weights and threads are laid out. A layer is two calls and its attention a
// third, or all layers are one call. Sums stay in float32 until half a layer is over.
//
// The order of a sum depends neither on the number of rows of a call nor on the slots of keys. So a token's
// numbers are the same bits in a pass over one token, a chain or a tree.
//
// Legend: see gemm.h.

#include <vector>

#include "attention.h"
#include "decoder_layer.h"
#include "grow_tree.h"
#include "layouts.h"
#include "noise.h"
#ifdef __AVX512BF16__
#include "quantized_weight.h"
#endif

extern "C" {

// A pass of all layers over tokens whose keys and values are stored in one tensor,
// (layers, 2, cache rows, J, slots, D). A row of other tensors is a token, or a request.
struct Pass {
  const float *cos, *sin;
  int64_t turned, period;    // of angles, (period, turned): those of row 0, 1, ... and again from the start
  bf16* cache;               // of the pass's first layer
  int64_t layer, half, cache_row, head;  // strides, in numbers
  const int64_t* starts;     // the slot of each row's first token
  Attention attention;       // but for query, key, value and out
  const bf16* norm;          // behind the last layer, or null
  float eps;                 // of that norm
};

// What a drafter's states go through before they enter the target's last layers, or its head.
struct Exit {
  const bf16* norm;
  const Matrix* linear;
  float eps;
  float scale;  // of its outputs
};

// A drafter. `text` (SA) runs on every token. Nodes that get drafts also run through `memory` (CA), then
// the exit and the reused target layers, if any. Angles of drafts follow those of the text.
struct Drafter {
  const Layer *text, *memory;
  const Layer* last;  // of the target's layers
  int64_t reused;     // how many of them, none or more
  const Exit* exit;   // or null
  Pass text_pass;               // SA runs on all unread tokens
  Pass memory_pass, last_pass;  // CA and reused layers on the last `finished`, those drafted below
  int64_t finished;
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
  // Of what is encoded, (tokens, layers, heads, 2, D): how many heads, and its strides.
  int64_t heads, token_stride, layer_stride, head_stride, half_stride;
};

}  // extern "C"

namespace {

// Where the newest keys and values of a pass are stored.
inline bf16* stored(const Pass& pass, int64_t layer, int64_t stored_heads, int64_t row, int64_t head) {
  const int64_t request = row / pass.attention.tokens;
  const int64_t slot = pass.starts[request] + row % pass.attention.tokens;
  return pass.cache + layer * pass.layer + head / stored_heads * pass.half +
         pass.attention.cache_rows[request] * pass.cache_row + head % stored_heads * pass.head +
         slot * pass.attention.head_dim;
}

// Memory that a team shares in a pass over `rows` rows.
struct PassRoom {
  Room room;
  std::vector<bf16> asked, read;  // queries and results of attention, (rows, H, D)

  PassRoom(const Layer* layers, int64_t count, const Attention& attention, int64_t rows)
      : asked(rows * attention.heads * attention.head_dim), read(asked.size()) {
    for (int64_t i = 0; i < count; i++) room = room_for(layers[i], rows);
  }
};

// All layers and the norm behind them, in place, by a team, which waits at the end: x is (B * T, E).
void team_stack(const Layer* layers, int64_t count, const Pass& pass, bf16* x, PassRoom& room) {
  Attention call = pass.attention;
  const int64_t dim = call.head_dim, rows = call.rows * call.tokens;
  call.query = room.asked.data();
  call.query_head = dim;
  call.query_token = call.heads * dim;
  call.query_row = call.tokens * call.query_token;
  call.out = room.read.data();
  const Angles angles = {pass.cos, pass.sin, pass.turned, pass.period};
  for (int64_t i = 0; i < count; i++) {
    team_project(layers[i], x, rows, angles, room.room, [&](int64_t row, int64_t head) {
      return head < call.heads ? room.asked.data() + (row * call.heads + head) * dim
                               : stored(pass, i, layers[i].kv_heads, row, head - call.heads);
    });
#pragma omp barrier
    call.key = pass.cache + i * pass.layer;
    call.value = call.key + pass.half;
    team_attend(call);
    team_finish(layers[i], x, room.read.data(), rows, 1, room.room, x);
#pragma omp barrier
  }
  if (!pass.norm) return;
  const int64_t width = layers->output.outputs;
  const Stretch share = share_of(rows);
  for (int64_t row = share.start; row < share.stop; row++)
    rms_norm([&](int64_t i) { return load(x + row * width + i); }, pass.norm, pass.eps, width,
              x + row * width);
#pragma omp barrier
}

// An exit, in place, by a team, which waits at the end: x is (rows, E), at most kChunkRows.
void team_exit(const Exit& exit, bf16* x, int64_t rows) {
  const int64_t width = exit.linear->outputs;
  const bf16* normed = rms_normed(x, exit.norm, exit.eps, rows, width);
#pragma omp barrier
  multiply(*exit.linear, normed, rows, width, [&](int64_t row, int64_t output, Floats sums) {
    store(x + row * width + output, sums * all(exit.scale));
  });
#pragma omp barrier
}

// A thread's passes over a text and over the drafts behind it.
struct TreePasses {
  Pass text, memory, last;

  TreePasses(const Drafter& drafter, int64_t slots)
      : text(drafter.text_pass), memory(drafter.memory_pass), last(drafter.last_pass), slots_(slots) {}
  TreePasses(const TreePasses&) = delete;  // passes have the address of `start_`

  // The next tokens are in slots from `start` on, of the text and of the target's own keys and values; they
  // see what masks, (count, slots), say of the first so many.
  void place(int64_t start, int64_t count, int64_t seen, const uint8_t* masks) {
    start_ = start;
    for (Pass* pass : {&text, &last}) {
      pass->starts = &start_;
      pass->attention.slots = seen;
      pass->attention.mask = masks;
      pass->attention.mask_token = slots_;
    }
    for (Pass* pass : {&text, &memory, &last}) pass->attention.tokens = count;
  }

  // They are at one position; its angles are `of_text` or `of_others` rows further on.
  void turn(int64_t of_text, int64_t of_others) {
    for (Pass* pass : {&text, &memory, &last}) {
      const int64_t skipped = (pass == &text ? of_text : of_others) * pass->turned;
      pass->cos += skipped;
      pass->sin += skipped;
      pass->period = 1;
    }
  }

 private:
  int64_t slots_, start_ = 0;
};

// See `moaspec_tree`; the finder says which children each leaf gets.
template <class Finder>
void grow_tree(const Drafter& drafter, const int64_t* unread, int64_t tokens, Growth& growth, Finder&& finder,
               int32_t threads) {
  const int64_t width = drafter.width, start = *drafter.text_pass.starts, visible = start + tokens;
  const int64_t rows = std::max(tokens, growth.breadth), finished = drafter.finished;
  const int64_t slots = visible + (growth.depth - 1) * growth.breadth;
  std::vector<bf16> x(rows * width);
  const auto read = [&](int64_t token, int64_t row) {
    std::copy_n(drafter.embeddings + token * width, width, x.data() + row * width);
  };
  for (int64_t i = 0; i < tokens; i++) read(unread[i], i);
  // Each of the unread tokens sees those before it, and itself.
  std::vector<uint8_t> mask(rows * slots, 0);
  for (int64_t i = 0; i < tokens; i++) std::fill_n(mask.data() + i * slots, start + i + 1, 1);
  PassRoom of_text(drafter.text, 1, drafter.text_pass.attention, rows);
  PassRoom of_memory(drafter.memory, 1, drafter.memory_pass.attention, rows);
  PassRoom of_last(drafter.last, drafter.reused, drafter.last_pass.attention, rows);
  if (drafter.reused) of_memory.room = of_last.room;
  of_text.room = of_memory.room;  // the same memory, now large enough for all
  Leaves leaves(growth, visible, slots);
#pragma omp parallel num_threads(threads)
  {
    TreePasses passes(drafter, slots);
    passes.place(start, tokens, visible, mask.data());
    team_stack(drafter.text, 1, passes.text, x.data(), of_text);
    passes.place(visible - finished, finished, visible, mask.data() + (tokens - finished) * slots);
    bf16* state = x.data() + (tokens - finished) * width;
    for (int64_t level = 0; leaves.count() > 0; level++) {
      if (level > 0) {
        const int64_t first = leaves.first_slot(), count = leaves.count();
        passes.place(first, count, first + count, leaves.masks());
        passes.turn(level == 1 ? tokens : 1, level == 1 ? finished : 1);
        state = x.data();
        team_stack(drafter.text, 1, passes.text, state, of_text);
      }
      const int64_t count = passes.text.attention.tokens;
      team_stack(drafter.memory, 1, passes.memory, state, of_memory);
      if (drafter.exit) team_exit(*drafter.exit, state, count);
      if (drafter.reused) team_stack(drafter.last, drafter.reused, passes.last, state, of_last);
      if (level == 0) state += (finished - 1) * width;  // the root alone gets drafts
      finder.team_find(*drafter.head, state, leaves.count(), width, level);
#pragma omp barrier
#pragma omp single
      leaves.grow(finder, drafter.names, read);
    }
  }
}

}  // namespace

extern "C" {

// What this was compiled for, as `build.py` names it.
const char* moaspec_instructions() {
#if defined(__AMX_BF16__)
  return "amx";
#elif defined(__AVX512BF16__)
  return "avx512";
#else
  return "avx2";
#endif
}

// Sizes and offsets of all structures that cross the border, in the order of `structures.py`.
const int64_t* moaspec_layouts(int64_t* count) {
  static const std::vector<int64_t> all = [] {
    std::vector<int64_t> found;
    add_parts(found);
    {
      using S = Pass;
      add_layout<S>(found, {AT(cos), AT(sin), AT(turned), AT(period), AT(cache), AT(layer), AT(half), AT(cache_row),
                            AT(head), AT(starts), AT(attention), AT(norm), AT(eps)});
    }
    {
      using S = Encoder;
      add_layout<S>(found, {AT(layer), AT(cos), AT(sin), AT(turned), AT(layers), AT(scale), AT(projection),
                            AT(memory), AT(heads), AT(token_stride), AT(layer_stride), AT(head_stride),
                            AT(half_stride)});
    }
    {
      using S = Exit;
      add_layout<S>(found, {AT(norm), AT(linear), AT(eps), AT(scale)});
    }
    {
      using S = Drafter;
      add_layout<S>(found, {AT(text), AT(memory), AT(last), AT(reused), AT(exit), AT(text_pass),
                            AT(memory_pass), AT(last_pass), AT(finished), AT(head), AT(names), AT(embeddings),
                            AT(width)});
    }
    return found;
  }();
  *count = all.size();
  return all.data();
}

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
  ArgMax arg_max(rows, threads);
#pragma omp parallel num_threads(threads)
  arg_max.team_find(*matrix, x, stride);
  for (int64_t row = 0; row < rows; row++) out[row] = arg_max.best(row);
}

// An exit, in place.
void moaspec_exit(const Exit* exit, bf16* x, int64_t rows, int32_t threads) {
  for (int64_t row = 0; row < rows; row += kChunkRows)
#pragma omp parallel num_threads(threads)
    team_exit(*exit, x + row * exit->linear->outputs, std::min(kChunkRows, rows - row));
}

// RMSNorm of each row; `out` may be `x`.
void moaspec_norm(const bf16* x, const bf16* weight, float eps, int64_t rows, int64_t width, bf16* out,
                  int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > kChunkRows)
  for (int64_t row = 0; row < rows; row++) {
    const bf16* from = x + row * width;
    rms_norm([&](int64_t i) { return load(from + i); }, weight, eps, width, out + row * width);
  }
}

// Norm, products, norms of heads and rotary embeddings: (rows, H + 2 J, D), contiguous.
// Cosines and sines are (period, turned), those of row 0, 1, ... and again from the start.
void moaspec_project(const Layer* layer, const bf16* x, int64_t rows, const float* cos,
                     const float* sin, int64_t turned, int64_t period, bf16* out,
                     int32_t threads) {
  const Room room = room_for(*layer, rows);
  const int64_t heads = layer->heads + 2 * layer->kv_heads;
#pragma omp parallel num_threads(threads)
  team_project(*layer, x, rows, {cos, sin, turned, period}, room,
               [&](int64_t row, int64_t head) { return out + (row * heads + head) * layer->head_dim; });
}

// What follows a layer's attention: the mean of each `group` rows, (rows / group, E).
void moaspec_finish(const Layer* layer, const bf16* x, const bf16* read, int64_t rows,
                    int64_t group, bf16* out, int32_t threads) {
  const Room room = room_for(*layer, rows, group);
#pragma omp parallel num_threads(threads)
  team_finish(*layer, x, read, rows, group, room, out);
}

// Attention of few queries to keys and values of any strides.
void moaspec_attend(const Attention* call, int32_t threads) {
#pragma omp parallel num_threads(threads)
  team_attend(*call);
}

// All layers and the norm behind them, in place: x is (B * T, E).
void moaspec_stack(const Layer* layers, int64_t count, const Pass* pass, bf16* x,
                   int32_t threads) {
  const Attention& attention = pass->attention;
  PassRoom room(layers, count, attention, attention.rows * attention.tokens);
#pragma omp parallel num_threads(threads)
  team_stack(layers, count, *pass, x, room);
}

// Reads unread text, which ends with the root, and grows a tree of drafts below it.
void moaspec_tree(const Drafter* drafter, const int64_t* unread, int64_t tokens, Growth* growth,
                  int32_t threads) {
  const Matrix& head = *drafter->head;
  const int64_t breadth = growth->breadth;
  if (growth->coupling)
    grow_tree(*drafter, unread, tokens, *growth,
              Coupled(head, breadth, breadth, *growth->coupling, drafter->names), threads);
  else
    grow_tree(*drafter, unread, tokens, *growth, TopOutputs(head, breadth, breadth), threads);
}

// The token that each row's sampler chooses.
void moaspec_choose(const float* logits, int64_t rows, int64_t size, const SamplerParams* samplers,
                    int64_t* out, int32_t threads) {
  Draw draw(threads);
#pragma omp parallel num_threads(threads)
  for (int64_t row = 0; row < rows; row++) {
    draw.team_draw(samplers[row], logits + row * size, size);
#pragma omp single
    out[row] = draw.token();
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

// Keys and values of all layers as what a drafter attends to, (tokens, 2 J, D).
void moaspec_encode(const Encoder* encoder, const bf16* x, int64_t tokens, const float* cos,
                    const float* sin, int64_t turned, bf16* out, int32_t threads) {
  const Layer &layer = *encoder->layer, &memory = *encoder->memory;
  const int64_t layers = encoder->layers, dim = layer.head_dim, width = layer.read.inputs;
  const int64_t heads = layer.heads + 2 * layer.kv_heads;
  const int64_t states = encoder->projection->outputs, given = 2 * memory.kv_heads;
  const int64_t most = std::min(tokens, kEncodedTokens);
  std::vector<bf16> asked(most * layers * heads * dim), read(most * layers * layer.heads * dim);
  std::vector<bf16> means(most * width), projected(most * states), from(most * layers * width);
  const int64_t half = width / encoder->heads / 2;
  const Angles of_layers = {encoder->cos, encoder->sin, encoder->turned, layers};
  room_for(layer, most * layers, layers);
  const Room room = room_for(memory, most);  // the same memory, now large enough for both
#pragma omp parallel num_threads(threads)
  for (int64_t start = 0; start < tokens; start += most) {
    const int64_t count = std::min(most, tokens - start), rows = count * layers;
#pragma omp for collapse(2)
    for (int64_t token = 0; token < count; token++)
      for (int64_t i = 0; i < layers; i++) {
        const bf16* there = x + (start + token) * encoder->token_stride + i * encoder->layer_stride;
        bf16* here = from.data() + (token * layers + i) * width;
        for (int64_t part = 0; part < 2 * encoder->heads; part++, here += half)
          std::copy_n(there + part / 2 * encoder->head_stride + part % 2 * encoder->half_stride, half, here);
      }
    team_project(layer, from.data(), rows, of_layers, room, [&](int64_t row, int64_t head) {
      return asked.data() + (row * heads + head) * dim;
    });
#pragma omp barrier
    Attention call = {};
    call.query = asked.data();
    call.key = call.query + layer.heads * dim;
    call.value = call.key + layer.kv_heads * dim;
    call.out = read.data();
    call.rows = count;
    call.tokens = call.slots = layers;
    call.heads = layer.heads;
    call.kv_heads = layer.kv_heads;
    call.head_dim = dim;
    call.query_head = call.key_head = call.value_head = dim;
    call.query_token = call.key_slot = call.value_slot = heads * dim;
    call.query_row = call.key_row = call.value_row = layers * heads * dim;
    call.scale = encoder->scale;
    team_attend(call);
    team_finish(layer, from.data(), read.data(), rows, layers, room, means.data());
#pragma omp barrier
    multiply(*encoder->projection, means.data(), count, width,
             [&](int64_t row, int64_t output, Floats sums) {
               store(projected.data() + row * states + output, sums, states - output);
             });
#pragma omp barrier
    const Angles angles = {cos + start * turned, sin + start * turned, turned, count};
    team_project(memory, projected.data(), count, angles, room, [&](int64_t row, int64_t head) {
      return out + ((start + row) * given + head) * memory.head_dim;
    });
#pragma omp barrier
  }
}

}  // extern "C"
