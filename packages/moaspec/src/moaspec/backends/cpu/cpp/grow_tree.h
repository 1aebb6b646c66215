// A tree of drafts, grown level by level.
#pragma once

#include "rank_drafts.h"

extern "C" {

// The shape of a tree (filled in by Python) and its nodes. In each level the best leaves get children.
struct Growth {
  int64_t depth;    // levels, at most
  int64_t breadth;  // leaves of a level that get children, at most, and children of each
  float least;      // log-probability of the path that a node needs to get children
  int64_t levels;   // levels drafted
  int64_t leaves;   // nodes that got children, without the root
  int64_t nodes;    // nodes drafted, parents first; parent -1 is the root
  int64_t *tokens, *parents;
  float* scores;    // log-probability of each node's path
  const Coupling* coupling;  // null: drafts are ranked by the drafter's probabilities
};

}  // extern "C"

namespace {

// The leaves that the drafter processes next, with their masks: a leaf sees the text, its ancestors and
// itself.
class Leaves {
 public:
  // `slots`: those of the text, then those of the leaves of all levels.
  Leaves(Growth& growth, int64_t text_slots, int64_t slots)
      : growth_(growth), slots_(slots), first_slot_(text_slots - 1), nodes_{-1},
        masks_(growth.breadth * slots, 0) {
    growth.levels = growth.leaves = growth.nodes = 0;
    std::fill_n(masks_.data(), text_slots, 1);
  }

  int64_t count() const { return static_cast<int64_t>(nodes_.size()); }
  int64_t first_slot() const { return first_slot_; }
  const uint8_t* masks() const { return masks_.data(); }  // (count, slots)

  // Adds the children of all leaves to the tree; the best children become the leaves. Calls embed(token, row)
  // for each new leaf.
  template <class Finder, class Embed>
  void grow(const Finder& finder, const int64_t* names, const Embed& embed) {
    std::vector<Child> children;
    for (int64_t leaf = 0; leaf < count(); leaf++)
      for (const TopOutput& one : finder.best(leaf)) {
        const int64_t node = growth_.nodes++;
        const float parent_score = nodes_[leaf] < 0 ? 0.0f : growth_.scores[nodes_[leaf]];
        growth_.tokens[node] = names[one.output];
        growth_.parents[node] = nodes_[leaf];
        growth_.scores[node] = parent_score + one.log_probability;
        if (growth_.scores[node] >= growth_.least) children.push_back({node, leaf});
      }
    if (++growth_.levels == growth_.depth) children.clear();
    std::stable_sort(children.begin(), children.end(), [&](const Child& a, const Child& b) {
      return growth_.scores[a.node] > growth_.scores[b.node];
    });
    children.resize(std::min<size_t>(children.size(), growth_.breadth));
    growth_.leaves += static_cast<int64_t>(children.size());
    first_slot_ += count();
    const std::vector<uint8_t> parent_masks = masks_;
    nodes_.clear();
    for (const Child& child : children) {
      const int64_t row = count();
      std::copy_n(parent_masks.data() + child.leaf * slots_, slots_, masks_.data() + row * slots_);
      masks_[row * slots_ + first_slot_ + row] = 1;
      embed(growth_.tokens[child.node], row);
      nodes_.push_back(child.node);
    }
  }

 private:
  struct Child { int64_t node, leaf; };

  Growth& growth_;
  int64_t slots_, first_slot_;
  std::vector<int64_t> nodes_;
  std::vector<uint8_t> masks_;
};

}  // namespace
