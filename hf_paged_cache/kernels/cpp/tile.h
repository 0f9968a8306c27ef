// Attention of a few queries over one tile: one block's keys and values of one kv head.
#pragma once

#include "mask.h"
#include "scores.h"
#include "softmax.h"
#include "values.h"

namespace paged {

constexpr int kMaxBlockSize = 256;
constexpr int kMaxRows = 4;  // queries that share one pass over a tile
constexpr int kScoreStride = kMaxBlockSize + kScoreSlack;

// The tokens of one block that any query of the call may see.
template <class Row>
struct Tile {
  const typename Row::Element* keys;
  const typename Row::Element* values;
  std::int64_t first;  // column of the first token
  int tokens;
  bool masked;  // whether the mask says anything about these tokens
  // Distances to the tile that is read next.
  std::int64_t key_prefetch_bytes, value_prefetch_bytes;
};

// Consecutive query rows of one kv head. Row `first + r` is query token (first + r) / group of query head
// kv_head * group + (first + r) % group: heads of one token are neighbours, so that they share a causal
// limit.
struct Rows {
  std::int64_t batch_row, kv_head, first;
  const float* queries;
  float* sums;
  Softmax* softmax;
};

// Calls f(first row, number of rows) until all rows are done: up to kMaxRows at once, as even as can be: 5
// rows are 3 + 2, not 4 + 1.
template <class F>
void by_passes(std::int64_t rows, F f) {
  std::int64_t passes = (rows + kMaxRows - 1) / kMaxRows;
  for (std::int64_t first = 0; passes > 0; --passes) {
    const std::int64_t count = (rows - first + passes - 1) / passes;
    switch (count) {
      case 1:
        f(first, std::integral_constant<int, 1>());
        break;
      case 2:
        f(first, std::integral_constant<int, 2>());
        break;
      case 3:
        f(first, std::integral_constant<int, 3>());
        break;
      default:
        f(first, std::integral_constant<int, 4>());
        break;
    }
    first += count;
  }
}

class TileAttention {
 public:
  TileAttention(const Blocks& blocks, const Call& call)
      : blocks_(blocks), call_(call), group_(call.q_heads / blocks.kv_heads) {}

  template <class Row, int R>
  void attend(const Tile<Row>& tile, const Rows& rows) const {
    alignas(64) float scores[R * kScoreStride];
    score_tile<Row, R>(rows.queries, prepared_query_floats<Row>(blocks_.head_dim), tile.keys,
                       blocks_.key_token_stride, tile.tokens, static_cast<int>(blocks_.head_dim), scores,
                       kScoreStride, tile.key_prefetch_bytes);
    const bool hidden = weigh<R>(scores, tile.first, tile.tokens, tile.masked, rows);
    add<Row, R>(scores, hidden, tile, rows);
  }

  // Turns dot products into weights, and brings the sums of the rows to the new top. Returns whether any row
  // does not see some token.
  template <int R>
  bool weigh(float* scores, std::int64_t first, int tokens, bool masked, const Rows& rows) const {
    const std::int64_t sums_stride = round_up(blocks_.v_head_dim, kPair);
    const int padded = static_cast<int>(round_up(tokens, kLanes));
    bool hidden = false;
    for (int r = 0; r < R; ++r) {
      float* row = scores + r * kScoreStride;
      finish_scores(row, padded);
      hidden |= hide(first, tokens, masked, rows, r, row);
      for (int t = tokens; t < padded; ++t) row[t] = -kInfinity;
      const float factor = soften(row, padded, rows.softmax[r]);
      if (factor != 1.0f) rescale(rows.sums + r * sums_stride, sums_stride, factor);
    }
    return hidden;
  }

  // Adds the weighted values of a tile to the sums of the rows.
  template <class Row, int R>
  void add(const float* weights, bool hidden, const Tile<Row>& tile, const Rows& rows) const {
    const std::int64_t sums_stride = round_up(blocks_.v_head_dim, kPair);
    const int value_dim = static_cast<int>(blocks_.v_head_dim);
    if (!hidden) {
      add_values<Row, R>(weights, kScoreStride, tile.values, blocks_.value_token_stride, tile.tokens,
                         value_dim, rows.sums, sums_stride, tile.value_prefetch_bytes);
    } else {
      add_seen_values<Row, R>(weights, tile, value_dim, rows.sums, sums_stride);
    }
  }

 private:
  void finish_scores(float* scores, int count) const {
    const float scale = static_cast<float>(call_.scale);
    const float cap = static_cast<float>(call_.softcap);
    if (scale == 1.0f && cap == 0.0f) return;
    for (int t = 0; t < count; t += kLanes) {
      const Vec scaled = load(scores + t) * scale;
      store(scores + t, cap == 0.0f ? scaled : softcap(scaled, cap));
    }
  }

  // Hides what row r of `rows` must not see by causality, window and mask. Returns whether anything is
  // hidden.
  bool hide(std::int64_t first, int tokens, bool masked, const Rows& rows, int r, float* scores) const {
    const std::int64_t row = rows.first + r;
    const std::int64_t query = row / group_;
    const std::int64_t position = call_.first_query + query;
    bool hidden = false;
    if (masked) {
      const std::int64_t head = rows.kv_head * group_ + row % group_;
      hidden = mask_query(call_, rows.batch_row, head, query, first - call_.start, tokens, scores);
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

  static void rescale(float* sums, std::int64_t count, float factor) {
    for (std::int64_t i = 0; i < count; i += kLanes) store(sums + i, load(sums + i) * factor);
  }

  // Adds the values of each token only to the rows that see it: 0 * NaN would carry a hidden token's garbage
  // into the sum. Goes by runs of tokens that the same rows see.
  template <class Row, int R>
  void add_seen_values(const float* weights, const Tile<Row>& tile, int dim, float* sums,
                       std::int64_t sums_stride) const {
    const auto seen_by = [&](int t) {
      unsigned rows = 0;
      for (int r = 0; r < R; ++r) rows |= static_cast<unsigned>(weights[r * kScoreStride + t] != 0.0f) << r;
      return rows;
    };
    for (int t = 0, stop; t < tile.tokens; t = stop) {
      const unsigned rows = seen_by(t);
      for (stop = t + 1; stop < tile.tokens && seen_by(stop) == rows; ++stop) {
      }
      const auto* values = tile.values + t * blocks_.value_token_stride;
      if (rows == (1u << R) - 1u) {
        add_values<Row, R>(weights + t, kScoreStride, values, blocks_.value_token_stride, stop - t, dim, sums,
                           sums_stride, tile.value_prefetch_bytes);
        continue;
      }
      for (int r = 0; r < R; ++r) {
        if ((rows >> r & 1u) == 0) continue;
        add_values<Row, 1>(weights + r * kScoreStride + t, kScoreStride, values, blocks_.value_token_stride,
                           stop - t, dim, sums + r * sums_stride, sums_stride, tile.value_prefetch_bytes);
      }
    }
  }

  const Blocks& blocks_;
  const Call& call_;
  std::int64_t group_;
};

}  // namespace paged
