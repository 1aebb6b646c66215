// Sizes and offsets of the structures that Python fills in. `structures.py` compares its own with them when
// it loads the library.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <vector>

#include "decoder_layer.h"
#include "grow_tree.h"

namespace {

// Appends the size of a structure, then the offsets of its fields in order.
template <class S>
void add_layout(std::vector<int64_t>& all, std::initializer_list<size_t> offsets) {
  all.push_back(sizeof(S));
  all.insert(all.end(), offsets.begin(), offsets.end());
}

#define AT(field) offsetof(S, field)

inline void add_parts(std::vector<int64_t>& all) {
  {
    using S = Matrix;
    add_layout<S>(all, {AT(panels), AT(bias), AT(inputs), AT(outputs), AT(bits), AT(rounded), AT(bounds),
                        AT(kind), AT(next)});
  }
  {
    using S = Embeddings;
    add_layout<S>(all, {AT(rows), AT(kind)});
  }
  {
    using S = OutputBounds;
    add_layout<S>(all, {AT(copy), AT(error), AT(norm)});
  }
  {
    using S = Layer;
    add_layout<S>(all, {AT(read), AT(output), AT(inner), AT(down), AT(norm), AT(inner_norm), AT(query_norm),
                        AT(key_norm), AT(eps), AT(heads), AT(kv_heads), AT(head_dim)});
  }
  {
    using S = Attention;
    add_layout<S>(all, {AT(query), AT(key), AT(value), AT(cache_rows), AT(mask), AT(out), AT(rows), AT(tokens),
                        AT(heads), AT(kv_heads), AT(head_dim), AT(slots), AT(query_row), AT(query_token),
                        AT(query_head), AT(key_row), AT(key_head), AT(key_slot), AT(value_row), AT(value_head),
                        AT(value_slot), AT(mask_row), AT(mask_token), AT(scale)});
  }
  {
    using S = SamplerParams;
    add_layout<S>(all, {AT(temperature), AT(top_k), AT(top_p), AT(min_p), AT(place.seed), AT(place.choice),
                        AT(place.position)});
  }
  {
    using S = Coupling;
    add_layout<S>(all, {AT(sampler), AT(agreement), AT(ranks)});
  }
  {
    using S = Growth;
    add_layout<S>(all, {AT(depth), AT(breadth), AT(least), AT(levels), AT(leaves), AT(nodes), AT(tokens),
                        AT(parents), AT(scores), AT(coupling)});
  }
}

}  // namespace
