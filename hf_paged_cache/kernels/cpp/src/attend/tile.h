// Attention of a few queries over one tile: one block's keys and values of one kv head. Weights are relative
// to the largest score so far (Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018).
#pragma once

#include "mask.h"
#include "scores.h"
#include "values.h"

namespace paged {

constexpr int kMaxQueries = 4;  // that share one pass over a tile

struct Softmax {
  float top = -kInfinity;  // largest score so far
  float total = 0.0f;      // sum of exp(score - top)
};

// What scores are measured from. Where all are -inf it is finite, so that weights are 0, not NaN.
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

// The tokens of one block that any query of the call may see.
struct VisibleBlock {
  int32_t entry;  // of the table
  bool masked;    // whether the mask says anything about these tokens
  int64_t first;  // column of the first token
  int64_t slot;   // of it, in the block
  int tokens;
};

// The same of one kv head, in the model's dtype.
template <class Element>
struct Tile {
  VisibleBlock block;
  Vectors<const typename Element::Type> keys, values;
  int64_t key_prefetch_bytes = 0, value_prefetch_bytes = 0;  // distances to the tile that is read next
};

// Consecutive queries of one kv head. Number `first + r` is token (first + r) / group of query head kv_head *
// group + (first + r) % group: heads of one token are neighbours, so that they share a causal limit.
struct Queries {
  int64_t batch_row, kv_head, first;
  Vectors<const float> prepared;
  Vectors<float> sums;
  Softmax* softmax;
};

// What a task leaves behind, for each query of the batch row, kv head by kv head.
struct Partial {
  Vectors<float> sums;  // unnormalised
  Softmax* softmax;
};

// Calls f(queries, their number) until all queries of a kv head, `count` of the row's, are done: up to
// kMaxQueries at once, as even as can be: 5 are 3 + 2, not 4 + 1.
template <class F>
void by_passes(int64_t count, int64_t b, int64_t h, Vectors<const float> prepared, const Partial& into, F f) {
  int64_t first = 0;
  for (int64_t passes = (count + kMaxQueries - 1) / kMaxQueries; passes > 0; --passes) {
    const int64_t together = (count - first + passes - 1) / passes;
    const int64_t index = h * count + first;
    const Queries queries = {b,
                             h,
                             first,
                             {prepared[index], prepared.stride},
                             {into.sums[index], into.sums.stride},
                             into.softmax + index};
    if (together == 1) f(queries, std::integral_constant<int, 1>());
    if (together == 2) f(queries, std::integral_constant<int, 2>());
    if (together == 3) f(queries, std::integral_constant<int, 3>());
    if (together == 4) f(queries, std::integral_constant<int, 4>());
    first += together;
  }
}

class TileAttention {
 public:
  // `scale` is that of the scores; 1 where the queries have taken it in.
  TileAttention(const Blocks& blocks, const Call& call, float scale)
      : call_(call),
        scale_(scale),
        group_(call.q_heads / blocks.kv_heads),
        key_dim_(static_cast<int>(blocks.keys.dim)),
        value_dim_(static_cast<int>(blocks.values.dim)) {}

  template <class Element, int R>
  void attend(const Tile<Element>& tile, const Queries& queries) const {
    alignas(64) float scores[R * kScoreStride];
    score_tile<Element, R>(queries.prepared, tile.keys, tile.block.tokens, key_dim_, scores,
                           tile.key_prefetch_bytes);
    const bool hidden = to_weights<R>(scores, tile.block, queries);
    add<Element, R>(scores, hidden, tile, queries);
  }

  // Turns dot products into weights, and brings the sums to the new top. Returns whether any token is hidden.
  template <int R>
  bool to_weights(float* scores, const VisibleBlock& block, const Queries& queries) const {
    const int padded = static_cast<int>(round_up(block.tokens, kLanes));
    bool hidden = false;
    for (int r = 0; r < R; ++r) {
      float* own = scores + r * kScoreStride;
      finish_scores(own, padded);
      hidden |= mask(block, queries, r, own);
      for (int t = block.tokens; t < padded; ++t) own[t] = -kInfinity;
      const float factor = to_weights_of(own, padded, queries.softmax[r]);
      if (factor == 1.0f) continue;
      float* sums = queries.sums[r];
      for (int64_t i = 0; i < queries.sums.stride; i += kLanes) store(sums + i, load(sums + i) * factor);
    }
    return hidden;
  }

  // Adds the weighted values of a tile to the sums.
  template <class Element, int R>
  void add(const float* weights, bool hidden, const Tile<Element>& tile, const Queries& queries) const {
    if (hidden) return add_visible<Element, R>(weights, tile, queries.sums);
    add_values<Element, R>(weights, tile.values, tile.block.tokens, value_dim_, queries.sums,
                           tile.value_prefetch_bytes);
  }

 private:
  void finish_scores(float* scores, int count) const {
    const float cap = static_cast<float>(call_.softcap);
    if (scale_ == 1.0f && cap == 0.0f) return;
    for (int t = 0; t < count; t += kLanes) {
      const Vec scaled = load(scores + t) * scale_;
      store(scores + t, cap == 0.0f ? scaled : softcap(scaled, cap));
    }
  }

  // Hides what query r must not see by causality, window and mask. Returns whether anything is hidden.
  bool mask(const VisibleBlock& block, const Queries& queries, int r, float* scores) const {
    const int64_t first = block.first, query = queries.first + r;
    const int64_t token = query / group_;
    const int64_t position = call_.first_query + token;
    bool hidden = false;
    if (block.masked) {
      const int64_t head = queries.kv_head * group_ + query % group_;
      hidden = mask_query(call_, queries.batch_row, head, token, first - call_.start, block.tokens, scores);
    }
    for (int t = 0; call_.window != 0 && t < block.tokens && first + t <= position - call_.window; ++t) {
      scores[t] = -kInfinity;
      hidden = true;
    }
    for (int t = block.tokens - 1; call_.causal && t >= 0 && first + t > position; --t) {
      scores[t] = -kInfinity;
      hidden = true;
    }
    return hidden;
  }

  // Adds the values of each token only to the queries that see it: 0 * NaN would carry a hidden token's
  // garbage into the sum. Goes by runs of tokens that the same queries see.
  template <class Element, int R>
  void add_visible(const float* weights, const Tile<Element>& tile, Vectors<float> sums) const {
    const auto visible_to = [&](int t) {
      unsigned queries = 0;
      for (int r = 0; r < R; ++r) {
        queries |= static_cast<unsigned>(weights[r * kScoreStride + t] != 0.0f) << r;
      }
      return queries;
    };
    for (int t = 0, stop; t < tile.block.tokens; t = stop) {
      const unsigned queries = visible_to(t);
      for (stop = t + 1; stop < tile.block.tokens && visible_to(stop) == queries; ++stop) {
      }
      const Vectors<const typename Element::Type> values = {tile.values[t], tile.values.stride};
      if (queries == (1u << R) - 1u) {
        add_values<Element, R>(weights + t, values, stop - t, value_dim_, sums, tile.value_prefetch_bytes);
        continue;
      }
      for (int r = 0; r < R; ++r) {
        if ((queries >> r & 1u) == 0) continue;
        add_values<Element, 1>(weights + r * kScoreStride + t, values, stop - t, value_dim_,
                               {sums[r], sums.stride}, tile.value_prefetch_bytes);
      }
    }
  }

  const Call& call_;
  const float scale_;
  const int64_t group_;
  const int key_dim_, value_dim_;
};

}  // namespace paged
