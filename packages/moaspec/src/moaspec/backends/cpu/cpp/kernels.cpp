// The functions that Python calls: decoder layers, attention, drafting and sampling, for a few rows of bf16.
//
// README.md explains the layout of weights and the use of threads. A layer takes three calls
// (`moaspec_project`, `moaspec_attend`, `moaspec_finish`), a stack of layers one. Within a call, outputs of
// products and residuals stay in float32.
//
// The order in which a sum accumulates depends neither on the number of rows nor on the slots of keys. So a
// token's results have the same bits in a pass over one token, a chain or a tree.
//
// Legend: see gemm.h.

#include <vector>

#include "attention.h"
#include "decoder_layer.h"
#include "distil.h"
#include "grow_tree.h"
#include "layouts.h"
#include "noise.h"
#ifdef __AVX512BF16__
#include "quantized_weight.h"
#endif

extern "C" {

// A pass of a stack of layers. Keys and values are in one tensor, (layers, 2, cache rows, J, slots, D).
// Activations are (B * T, E): a row for each token of each of the B requests.
struct Pass {
  const float *cos, *sin;
  int64_t turned, period;    // of cos and sin, (period, turned); row i has those of i % period
  bf16* cache;               // at the first layer of the pass
  int64_t layer, half, cache_row, head;  // strides, in numbers
  const int64_t* starts;     // slot of each request's first token, which the pass writes
  Attention attention;       // without query, key, value and out
  const bf16* norm;          // RMSNorm after the last layer, or null
  float eps;                 // of that norm
};

// The adapter from a drafter's states to the target's last layers, or its head: RMSNorm, linear layer, scale.
struct Exit {
  const bf16* norm;
  const Matrix* linear;
  float eps;
  float scale;  // of the linear layer's outputs
};

// A drafter. Every token runs through `text` (SA). The last `finished` unread tokens and the drafts that get
// children also run through `memory` (CA), then through the exit and the target's last layers, if any.
// `cos` and `sin` of passes have rows for the unread tokens, then one for each level of drafts.
struct Drafter {
  const Layer* text;
  int64_t text_layers;  // of SA
  const Layer* memory;
  const Layer* last;  // the first of the reused target layers
  int64_t reused;     // number of reused target layers, 0 or more
  const Exit* exit;   // or null
  Pass text_pass;               // of SA, over all unread tokens
  Pass memory_pass, last_pass;  // of CA and the reused layers, over the last `finished` of them
  int64_t finished;        // the root, and those before it that the target's cache lacks
  const Matrix* head;
  const int64_t* names;    // token ids of the head's outputs
  Embeddings embeddings;
  int64_t width;           // E
};

// A pass over the newest tokens of one text and over drafts after them, with the target's choices.
struct TextPass {
  const Layer* layers;
  int64_t count;           // of layers
  Pass text;               // its `cos` and `sin` have a row for each position from `starts` on; it has no mask
  Embeddings embeddings;
  const Matrix* head;      // or null, for a pass without choices
};

// The encoder: from a token's keys and values in all target layers to the key and value that CA attends to.
// LSA over the layers, mean, projection, CA's key and value projections.
struct Encoder {
  const Layer* layer;        // LSA, whose rows are the target layers of one token
  const float *cos, *sin;    // (layers, turned)
  int64_t turned;
  int64_t layers;
  float scale;               // of the attention scores
  const Matrix* projection;  // of the means over layers
  const Layer* memory;       // CA, without queries
  // Heads and strides of the input, (tokens, layers, heads, 2, D).
  int64_t heads, token_stride, layer_stride, head_stride, half_stride;
};

}  // extern "C"

namespace {

// Where a pass stores keys (head 0 to `heads` - 1) and values (the next `heads` heads) of row `row`.
inline bf16* cache_address(const Pass& pass, int64_t layer, int64_t heads, int64_t row, int64_t head) {
  const int64_t request = row / pass.attention.tokens;
  const int64_t slot = pass.starts[request] + row % pass.attention.tokens;
  return pass.cache + layer * pass.layer + head / heads * pass.half +
         pass.attention.cache_rows[request] * pass.cache_row + head % heads * pass.head +
         slot * pass.attention.head_dim;
}

// Buffers that a team shares in a pass over `rows` rows.
struct PassScratch {
  LayerScratch layer;
  std::vector<bf16> queries, attended;  // queries and outputs of attention, (rows, H, D)

  PassScratch(const Layer* layers, int64_t count, const Attention& attention, int64_t rows)
      : queries(rows * attention.heads * attention.head_dim), attended(queries.size()) {
    for (int64_t i = 0; i < count; i++) layer = scratch_for(layers[i], rows);
  }
};

// Runs a stack of layers and the norm after it on x, (B * T, E), in place. Has a barrier at its end.
void team_stack(const Layer* layers, int64_t count, const Pass& pass, bf16* x, PassScratch& shared) {
  Attention call = pass.attention;
  const int64_t dim = call.head_dim, rows = call.rows * call.tokens;
  call.query = shared.queries.data();
  call.query_head = dim;
  call.query_token = call.heads * dim;
  call.query_row = call.tokens * call.query_token;
  call.out = shared.attended.data();
  const Angles angles = {pass.cos, pass.sin, pass.turned, pass.period};
  for (int64_t i = 0; i < count; i++) {
    team_project(layers[i], x, rows, angles, shared.layer, [&](int64_t row, int64_t head) {
      return head < call.heads ? shared.queries.data() + (row * call.heads + head) * dim
                               : cache_address(pass, i, layers[i].kv_heads, row, head - call.heads);
    });
#pragma omp barrier
    call.key = pass.cache + i * pass.layer;
    call.value = call.key + pass.half;
    team_attend(call);
    team_finish(layers[i], x, shared.attended.data(), rows, 1, shared.layer, x);
#pragma omp barrier
  }
  if (!pass.norm) return;
  const int64_t width = layers->output.outputs;
  const Range share = share_of(rows);
  for (int64_t row = share.start; row < share.stop; row++)
    rms_norm([&](int64_t i) { return load(x + row * width + i); }, pass.norm, pass.eps, width,
              x + row * width);
#pragma omp barrier
}

// Stores keys and values of the first `count` tokens of a pass through one layer over one text, x, (count, E).
// `storing` is the layer `without_queries`. The pass goes on behind these tokens: `start`, which `pass.starts` points
// to, becomes their end. Has a barrier at its end.
void team_store(const Layer& storing, const bf16* x, int64_t count, const LayerScratch& shared, Pass& pass,
                int64_t& start) {
  team_project(storing, x, count, {pass.cos, pass.sin, pass.turned, pass.period}, shared,
               [&](int64_t row, int64_t head) { return cache_address(pass, 0, storing.kv_heads, row, head); });
#pragma omp barrier
  pass.cos += count * pass.turned;
  pass.sin += count * pass.turned;
  start += count;
}

// Applies an exit to x, (rows, E), in place. Has a barrier at its end.
void team_exit(const Exit& exit, bf16* x, int64_t rows) {
  const int64_t width = exit.linear->outputs;
  const bf16* normed = rms_normed(x, exit.norm, exit.eps, rows, width);
#pragma omp barrier
  multiply(*exit.linear, normed, rows, width, [&](int64_t row, int64_t output, Floats sums) {
    store(x + row * width + output, sums * broadcast(exit.scale));
  });
#pragma omp barrier
}

// A thread's passes over the unread tokens, then over levels of drafts.
struct TreePasses {
  Pass text, memory, last;

  TreePasses(const Drafter& drafter, int64_t slots)
      : text(drafter.text_pass), memory(drafter.memory_pass), last(drafter.last_pass), slots_(slots) {}
  TreePasses(const TreePasses&) = delete;  // passes hold the address of `start_`

  // The next `count` tokens. In the caches of SA and of the target they take the slots from `start` on, and
  // see of the first `visible` slots those that `masks`, (count, slots), has.
  void set_tokens(int64_t start, int64_t count, int64_t visible, const uint8_t* masks) {
    start_ = start;
    for (Pass* pass : {&text, &last}) {
      pass->starts = &start_;
      pass->attention.slots = visible;
      pass->attention.mask = masks;
      pass->attention.mask_token = slots_;
    }
    for (Pass* pass : {&text, &memory, &last}) pass->attention.tokens = count;
  }

  // Stores the keys and values of the next `count` unread tokens, x, (count, E), in all layers of SA, from slot
  // `start` on. `storing` is the last layer `without_queries`.
  void store_text(const Drafter& drafter, const Layer& storing, bf16* x, int64_t start, int64_t count,
                  const uint8_t* masks, PassScratch& shared) {
    const int64_t before = drafter.text_layers - 1;
    set_tokens(start, count, start + count, masks);
    team_stack(drafter.text, before, text, x, shared);
    text.cache += before * text.layer;  // not in a copy of the pass, whose angles go on
    team_store(storing, x, count, shared.layer, text, start_);
    text.cache -= before * text.layer;
  }

  // The next tokens share a position. Its angles are `rows` rows further on.
  void advance_angles(int64_t rows) {
    for (Pass* pass : {&text, &memory, &last}) {
      pass->cos += rows * pass->turned;
      pass->sin += rows * pass->turned;
      pass->period = 1;
    }
  }

 private:
  int64_t slots_, start_ = 0;
};

// `moaspec_tree`, with a finder (`TopOutputs` or `Coupled`) of each leaf's children.
template <class Finder>
void grow_tree(const Drafter& drafter, const int64_t* unread, int64_t tokens, Growth& growth, Finder&& finder,
               int32_t threads) {
  const int64_t width = drafter.width, start = *drafter.text_pass.starts, visible = start + tokens;
  const int64_t finished = drafter.finished, rows = std::max(finished, growth.breadth);
  const int64_t stored = tokens - finished;  // only their keys and values in SA's last layer are needed
  const int64_t slots = visible + (growth.depth - 1) * growth.breadth;
  const int64_t chunk = std::min(stored, kChunkRows), text_rows = std::max(rows, chunk);
  std::vector<bf16> x(text_rows * width);
  const auto embed_at = [&](int64_t token, int64_t row) {
    embed(drafter.embeddings, token, width, x.data() + row * width);
  };
  // An unread token sees the text up to itself.
  std::vector<uint8_t> mask(rows * slots, 0), stored_mask(drafter.text_layers > 1 ? chunk * slots : 0, 0);
  for (int64_t i = 0; i < finished; i++) std::fill_n(mask.data() + i * slots, start + stored + i + 1, 1);
  const Layer storing = without_queries(drafter.text[drafter.text_layers - 1]);
  PassScratch text_scratch(drafter.text, drafter.text_layers, drafter.text_pass.attention, text_rows);
  PassScratch memory_scratch(drafter.memory, 1, drafter.memory_pass.attention, rows);
  PassScratch last_scratch(drafter.last, drafter.reused, drafter.last_pass.attention, rows);
  if (drafter.reused) memory_scratch.layer = last_scratch.layer;
  text_scratch.layer = memory_scratch.layer;  // the same buffers, now large enough for all
  Leaves leaves(growth, visible, slots);
#pragma omp parallel num_threads(threads)
  {
    TreePasses passes(drafter, slots);
    for (int64_t first = 0; first < stored; first += kChunkRows) {
      const int64_t count = std::min(kChunkRows, stored - first);
#pragma omp for
      for (int64_t i = 0; i < count; i++) {
        embed_at(unread[first + i], i);
        if (drafter.text_layers > 1) std::fill_n(stored_mask.data() + i * slots, start + first + i + 1, 1);
      }
      passes.store_text(drafter, storing, x.data(), start + first, count, stored_mask.data(), text_scratch);
    }
#pragma omp for
    for (int64_t i = 0; i < finished; i++) embed_at(unread[stored + i], i);
    passes.set_tokens(start + stored, finished, visible, mask.data());
    for (int64_t level = 0; leaves.count() > 0; level++) {
      if (level > 0) {
        const int64_t first = leaves.first_slot(), count = leaves.count();
        passes.set_tokens(first, count, first + count, leaves.masks());
        passes.advance_angles(level == 1 ? finished : 1);
      }
      const int64_t count = passes.text.attention.tokens;
      team_stack(drafter.text, drafter.text_layers, passes.text, x.data(), text_scratch);
      team_stack(drafter.memory, 1, passes.memory, x.data(), memory_scratch);
      if (drafter.exit) team_exit(*drafter.exit, x.data(), count);
      if (drafter.reused) team_stack(drafter.last, drafter.reused, passes.last, x.data(), last_scratch);
      // Of the unread tokens only the root, the last, gets drafts.
      const bf16* state = x.data() + (count - leaves.count()) * width;
      finder.team_find(*drafter.head, state, leaves.count(), width, level);
#pragma omp barrier
#pragma omp single
      leaves.grow(finder, drafter.names, embed_at);
    }
  }
}

}  // namespace

extern "C" {

// The instruction set that this was compiled for, a key of `INSTRUCTIONS` in `build.py`.
const char* moaspec_instructions() {
#if defined(__AMX_BF16__)
  return "amx";
#elif defined(__AVX512BF16__)
  return "avx512";
#elif defined(__AVXVNNI__)
  return "avxvnni";
#else
  return "avx2";
#endif
}

// Sizes and offsets of all structures that Python fills in, in the order of `SHARED` in `structures.py`.
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
      using S = TextPass;
      add_layout<S>(found, {AT(layers), AT(count), AT(text), AT(embeddings), AT(head)});
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
      add_layout<S>(found, {AT(text), AT(text_layers), AT(memory), AT(last), AT(reused), AT(exit), AT(text_pass),
                            AT(memory_pass), AT(last_pass), AT(finished), AT(head), AT(names), AT(embeddings),
                            AT(width)});
    }
    return found;
  }();
  *count = all.size();
  return all.data();
}

// out = x times the transposed weight, plus the bias: (rows, outputs), contiguous, float32 if `single`, else
// bf16. Rows of x are `stride` numbers apart.
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

// The index of each row's largest output, the first of equal ones.
void moaspec_best(const Matrix* matrix, const bf16* x, int64_t rows, int64_t stride, int64_t* out,
                  int32_t threads) {
  ArgMax arg_max(rows, threads);
#pragma omp parallel num_threads(threads)
  arg_max.team_find(*matrix, x, stride);
  for (int64_t row = 0; row < rows; row++) out[row] = arg_max.best(row);
}

// Applies an exit to x, (rows, E), in place.
void moaspec_exit(const Exit* exit, bf16* x, int64_t rows, int32_t threads) {
  for (int64_t row = 0; row < rows; row += kChunkRows)
#pragma omp parallel num_threads(threads)
    team_exit(*exit, x + row * exit->linear->outputs, std::min(kChunkRows, rows - row));
}

// Embeddings of tokens, (count, width) bf16.
void moaspec_embed(const Embeddings* table, const int64_t* ids, int64_t count, int64_t width, bf16* out,
                   int32_t threads) {
#pragma omp parallel for num_threads(threads) if (count > kChunkRows)
  for (int64_t i = 0; i < count; i++) embed(*table, ids[i], width, out + i * width);
}

// RMSNorm of x, (rows, width); `out` may be `x`.
void moaspec_norm(const bf16* x, const bf16* weight, float eps, int64_t rows, int64_t width, bf16* out,
                  int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > kChunkRows)
  for (int64_t row = 0; row < rows; row++) {
    const bf16* from = x + row * width;
    rms_norm([&](int64_t i) { return load(from + i); }, weight, eps, width, out + row * width);
  }
}

// The part of a layer before attention: RMSNorm, projections, norms of heads, rotary embedding. `out` has
// queries, keys and values, (rows, H + 2 J, D). Row i has the angles i % period of `cos`
// and `sin`, (period, turned).
void moaspec_project(const Layer* layer, const bf16* x, int64_t rows, const float* cos,
                     const float* sin, int64_t turned, int64_t period, bf16* out,
                     int32_t threads) {
  const LayerScratch shared = scratch_for(*layer, rows);
  const int64_t heads = layer->heads + 2 * layer->kv_heads;
#pragma omp parallel num_threads(threads)
  team_project(*layer, x, rows, {cos, sin, turned, period}, shared,
               [&](int64_t row, int64_t head) { return out + (row * heads + head) * layer->head_dim; });
}

// The part of a layer after attention (`attended`: its output, (rows, H, D)), averaged over each `group`
// rows: (rows / group, E).
void moaspec_finish(const Layer* layer, const bf16* x, const bf16* attended, int64_t rows,
                    int64_t group, bf16* out, int32_t threads) {
  const LayerScratch shared = scratch_for(*layer, rows, group);
#pragma omp parallel num_threads(threads)
  team_finish(*layer, x, attended, rows, group, shared, out);
}

void moaspec_attend(const Attention* call, int32_t threads) {
#pragma omp parallel num_threads(threads)
  team_attend(*call);
}

// Runs a stack of layers and the norm after it on x, (B * T, E), in place.
void moaspec_stack(const Layer* layers, int64_t count, const Pass* pass, bf16* x,
                   int32_t threads) {
  const Attention& attention = pass->attention;
  PassScratch shared(layers, count, attention, attention.rows * attention.tokens);
#pragma omp parallel num_threads(threads)
  team_stack(layers, count, *pass, x, shared);
}

// Runs the target on tokens of one text, of which parents[i] is the one before token i, -1: the text that the
// cache holds. `states`, (tokens, E), gets the states of the last `finished` tokens after the last norm; others
// are left unfinished. After each of the last `choices` tokens `chosen` gets the one that the head finds likeliest.
void moaspec_text(const TextPass* target, const int64_t* ids, const int64_t* parents, int64_t tokens, bf16* states,
                  int64_t finished, int64_t choices, int64_t* chosen, int32_t threads) {
  Pass pass = target->text;
  const int64_t width = target->layers->output.outputs, turned = pass.turned, start = *pass.starts;
  const int64_t slots = start + tokens;
  std::vector<int64_t> distances(tokens);  // from the first new position
  std::vector<float> cos(tokens * turned), sin(cos.size());
  std::vector<uint8_t> masks(tokens * slots, 0);
  for (int64_t i = 0; i < tokens; i++) {
    const int64_t parent = parents[i];
    uint8_t* const mask = masks.data() + i * slots;
    distances[i] = parent < 0 ? 0 : distances[parent] + 1;
    if (parent < 0)
      std::fill_n(mask, start, 1);
    else
      std::copy_n(masks.data() + parent * slots, slots, mask);
    mask[start + i] = 1;
    std::copy_n(pass.cos + distances[i] * turned, turned, cos.data() + i * turned);
    std::copy_n(pass.sin + distances[i] * turned, turned, sin.data() + i * turned);
    embed(target->embeddings, ids[i], width, states + i * width);
  }
  pass.cos = cos.data();
  pass.sin = sin.data();
  pass.period = pass.attention.tokens = tokens;
  pass.attention.slots = pass.attention.mask_token = slots;
  pass.attention.mask = masks.data();
  // In the last layer only keys and values of the first tokens are needed.
  const int64_t before = target->count - 1, stored = tokens - finished;
  const Layer storing = without_queries(target->layers[before]);
  PassScratch shared(target->layers, target->count, pass.attention, tokens);
  ArgMax arg_max(choices, threads);
#pragma omp parallel num_threads(threads)
  {
    Pass mine = pass;
    mine.norm = nullptr;
    team_stack(target->layers, before, mine, states, shared);
    int64_t first = start;
    mine.starts = &first;
    mine.cache += before * mine.layer;
    if (stored) team_store(storing, states, stored, shared.layer, mine, first);
    mine.norm = pass.norm;
    mine.attention.tokens = finished;
    mine.attention.mask += stored * slots;
    team_stack(target->layers + before, 1, mine, states + stored * width, shared);
    if (choices) arg_max.team_find(*target->head, states + (tokens - choices) * width, width);
  }
  for (int64_t row = 0; row < choices; row++) chosen[row] = arg_max.best(row);
}

// Runs the drafter on the unread tokens, the last of which is the root, and drafts a tree below it.
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

// The token that each row's sampler chooses; logits are (rows, size).
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

// KL(p || q) of each row of logits, (rows, size), bf16 or (`wide`) float32, and whether both have their largest
// logit at one place. The gradient by q's logits, times the row's factor, overwrites p's.
void moaspec_forward_kl(void* p, const void* q, int64_t wide, int64_t rows, int64_t size, const float* factors,
                        float* divergences, bool* hits, int32_t threads) {
  const auto run = [&](auto* of_p, const auto* of_q) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
      const RowLoss found = kl_row(of_p + row * size, of_q + row * size, size, factors[row]);
      divergences[row] = found.divergence;
      hits[row] = found.hit;
    }
  };
  if (wide)
    run(static_cast<float*>(p), static_cast<const float*>(q));
  else
    run(static_cast<bf16*>(p), static_cast<const bf16*>(q));
}

// Positional noise of `count` tokens at each of `num` places, as integers: (num, count). Tokens of place i
// begin at tokens[i * stride]; with stride 0 all places have the same tokens.
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

// Encodes keys and values of tokens in all target layers (x, with the strides of `Encoder`) to those that CA
// attends to: (J, tokens, D) each, heads `head_stride` numbers apart.
void moaspec_encode(const Encoder* encoder, const bf16* x, int64_t tokens, const float* cos,
                    const float* sin, int64_t turned, bf16* keys, bf16* values, int64_t head_stride,
                    int32_t threads) {
  const Layer &layer = *encoder->layer, &memory = *encoder->memory;
  const int64_t layers = encoder->layers, dim = layer.head_dim, width = layer.read.inputs;
  const int64_t heads = layer.heads + 2 * layer.kv_heads;
  const int64_t states = encoder->projection->outputs;
  const int64_t most = std::min(tokens, kEncodedTokens);
  std::vector<bf16> qkv(most * layers * heads * dim), attended(most * layers * layer.heads * dim);
  std::vector<bf16> means(most * width), projected(most * states), from(most * layers * width);
  const int64_t half = width / encoder->heads / 2;
  const Angles of_layers = {encoder->cos, encoder->sin, encoder->turned, layers};
  scratch_for(layer, most * layers, layers);
  const LayerScratch shared = scratch_for(memory, most);  // the same buffers, now large enough for both
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
    team_project(layer, from.data(), rows, of_layers, shared, [&](int64_t row, int64_t head) {
      return qkv.data() + (row * heads + head) * dim;
    });
#pragma omp barrier
    Attention call = {};
    call.query = qkv.data();
    call.key = call.query + layer.heads * dim;
    call.value = call.key + layer.kv_heads * dim;
    call.out = attended.data();
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
    team_finish(layer, from.data(), attended.data(), rows, layers, shared, means.data());
#pragma omp barrier
    multiply(*encoder->projection, means.data(), count, width,
             [&](int64_t row, int64_t output, Floats sums) {
               store(projected.data() + row * states + output, sums, states - output);
             });
#pragma omp barrier
    const Angles angles = {cos + start * turned, sin + start * turned, turned, count};
    team_project(memory, projected.data(), count, angles, shared, [&](int64_t row, int64_t head) {
      bf16* const out = head < memory.kv_heads ? keys : values;
      return out + head % memory.kv_heads * head_stride + (start + row) * memory.head_dim;
    });
#pragma omp barrier
  }
}

}  // extern "C"
