// One step of the online softmax: the scores of a tile become weights, relative to the largest score so far.
// (Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018.)
#pragma once

#include "../base/simd.h"

namespace paged {

struct Softmax {
  float top = -kInfinity;  // largest score so far
  float total = 0.0f;      // sum of exp(score - top)
};

// What scores are measured from. Where every score is -inf any finite number does: all weights are then 0,
// not NaN.
inline float base_of(float top) { return top == -kInfinity ? 0.0f : top; }

// Replaces `count` scores (a multiple of kLanes) by exp(score - new top). Returns the factor that brings sums
// taken before this step to the new top.
inline float to_weights_of(float* scores, int count, Softmax& state) {
  Vec best = splat(state.top);
  for (int t = 0; t < count; t += kLanes) best = maximum(best, load(scores + t));
  const float top = max_of(best);
  const Vec base = splat(base_of(top));
  Vec sum = {};
  for (int t = 0; t < count; t += kLanes) {
    const Vec weight = exp_nonpositive(load(scores + t) - base);
    store(scores + t, weight);
    sum = sum + weight;
  }
  const float factor = top == state.top ? 1.0f : std::exp(state.top - base_of(top));
  state.total = state.total * factor + sum_of(sum);
  state.top = top;
  return factor;
}

}  // namespace paged
