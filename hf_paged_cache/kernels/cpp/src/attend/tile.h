// Attention of a few queries over one tile: one block's keys and values of one kv head.
#pragma once

#include "mask.h"
#include "online_softmax.h"
#include "scores.h"
#include "values.h"

namespace paged {

constexpr int kMaxQueries = 4;  // that share one pass over a tile

// The tokens of one block that any query of the call may see.
template <class Element>
struct Tile {
  Vectors<const typename Element::Type> keys, values;
  int64_t first;  // column of the first token
  int tokens;
  bool masked;  // whether the mask says anything about these tokens
  // Distances to the tile that is read next.
  int64_t key_prefetch_bytes, value_prefetch_bytes;
};

// Consecutive queries of one kv head. Number `first + r` is token (first + r) / group of query head kv_head *
// group + (first + r) % group: heads of one token are neighbours, so that they share a causal limit.
struct Queries {
  int64_t batch_row, kv_head, first;
  Vectors<const float> prepared;
  Vectors<float> sums;
  Softmax* softmax;
};

// Calls f(first query, number of queries) until all are done: up to kMaxQueries at once, as even as can be: 5
// are 3 + 2, not 4 + 1.
template <class F>
void by_passes(int64_t queries, F f) {
  int64_t passes = (queries + kMaxQueries - 1) / kMaxQueries;
  for (int64_t first = 0; passes > 0; --passes) {
    const int64_t count = (queries - first + passes - 1) / passes;
    if (count == 1) f(first, std::integral_constant<int, 1>());
    if (count == 2) f(first, std::integral_constant<int, 2>());
    if (count == 3) f(first, std::integral_constant<int, 3>());
    if (count == 4) f(first, std::integral_constant<int, 4>());
    first += count;
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
    score_tile<Element, R>(queries.prepared, tile.keys, tile.tokens, key_dim_, scores,
                           tile.key_prefetch_bytes);
    const bool hidden = to_weights<R>(scores, tile.first, tile.tokens, tile.masked, queries);
    add<Element, R>(scores, hidden, tile, queries);
  }

  // Turns dot products into weights, and brings the sums to the new top. Returns whether any query does not
  // see some token.
  template <int R>
  bool to_weights(float* scores, int64_t first, int tokens, bool masked, const Queries& queries) const {
    const int padded = static_cast<int>(round_up(tokens, kLanes));
    bool hidden = false;
    for (int r = 0; r < R; ++r) {
      float* own = scores + r * kScoreStride;
      finish_scores(own, padded);
      hidden |= mask(first, tokens, masked, queries, r, own);
      for (int t = tokens; t < padded; ++t) own[t] = -kInfinity;
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
    add_values<Element, R>(weights, tile.values, tile.tokens, value_dim_, queries.sums,
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
  bool mask(int64_t first, int tokens, bool masked, const Queries& queries, int r, float* scores) const {
    const int64_t query = queries.first + r;
    const int64_t token = query / group_;
    const int64_t position = call_.first_query + token;
    bool hidden = false;
    if (masked) {
      const int64_t head = queries.kv_head * group_ + query % group_;
      hidden = mask_query(call_, queries.batch_row, head, token, first - call_.start, tokens, scores);
    }
    for (int t = 0; call_.window != 0 && t < tokens && first + t <= position - call_.window; ++t) {
      scores[t] = -kInfinity;
      hidden = true;
    }
    for (int t = tokens - 1; call_.causal && t >= 0 && first + t > position; --t) {
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
    for (int t = 0, stop; t < tile.tokens; t = stop) {
      const unsigned queries = visible_to(t);
      for (stop = t + 1; stop < tile.tokens && visible_to(stop) == queries; ++stop) {
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
