// A tree of drafts while it grows, level by level.
#pragma once

#include "rank_drafts.h"

extern "C" {

// The drafts below a root: children of the best leaves of each level.
struct Growth {
  int64_t depth;    // levels, at most
  int64_t breadth;  // leaves that get children, at most, and children of each
  float least;      // log-probability that a path must have for its last draft to get children
  int64_t levels;   // drafted
  int64_t leaves;   // that got children, but for the root
  int64_t nodes;    // drafted, parents first; a parent of -1 is the root
  int64_t *tokens, *parents;
  float* scores;    // log-probabilities of paths
  const Coupling* coupling;  // null: the best drafts are the likeliest
};

}  // extern "C"

namespace {

// The leaves that are read next, and what each of them sees: the text, and what lies between.
class Leaves {
 public:
  // `slots` are those of the text, then of each level's leaves.
  Leaves(Growth& growth, int64_t text_slots, int64_t slots)
      : growth_(growth), slots_(slots), first_slot_(text_slots - 1), nodes_{-1},
        masks_(growth.breadth * slots, 0) {
    growth.levels = growth.leaves = growth.nodes = 0;
    std::fill_n(masks_.data(), text_slots, 1);
  }

  int64_t count() const { return static_cast<int64_t>(nodes_.size()); }
  int64_t first_slot() const { return first_slot_; }
  const uint8_t* masks() const { return masks_.data(); }  // (count, slots)

  // Gives the leaves children and makes the best of these the leaves. `read` is told which token each
  // of them is.
  template <class Finder, class Read>
  void grow(const Finder& finder, const int64_t* names, const Read& read) {
    std::vector<Child> children;
    for (int64_t leaf = 0; leaf < count(); leaf++)
      for (const TopOutput& one : finder.best(leaf)) {
        const int64_t node = growth_.nodes++;
        const float above = nodes_[leaf] < 0 ? 0.0f : growth_.scores[nodes_[leaf]];
        growth_.tokens[node] = names[one.output];
        growth_.parents[node] = nodes_[leaf];
        growth_.scores[node] = above + one.log_probability;
        if (growth_.scores[node] >= growth_.least) children.push_back({node, leaf});
      }
    if (++growth_.levels == growth_.depth) children.clear();
    std::stable_sort(children.begin(), children.end(), [&](const Child& a, const Child& b) {
      return growth_.scores[a.node] > growth_.scores[b.node];
    });
    children.resize(std::min<size_t>(children.size(), growth_.breadth));
    growth_.leaves += static_cast<int64_t>(children.size());
    first_slot_ += count();
    const std::vector<uint8_t> above = masks_;
    nodes_.clear();
    for (const Child& child : children) {
      const int64_t row = count();
      std::copy_n(above.data() + child.leaf * slots_, slots_, masks_.data() + row * slots_);
      masks_[row * slots_ + first_slot_ + row] = 1;
      read(growth_.tokens[child.node], row);
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
