// Tiles of blocks in the model's dtype: whole layers of them, or the residual blocks of a layer with records.
#pragma once

#include "splits.h"

namespace paged {

template <class Element>
class DenseTiles {
  using Type = typename Element::Type;

 public:
  DenseTiles(const Blocks& blocks, const Call& call)
      : blocks_(blocks),
        call_(call),
        tiles_(blocks, call, static_cast<float>(call.scale)),
        queries_(call.q_heads * call.q_tokens),
        query_stride_(prepared_query_floats<Element>(blocks.keys.dim)) {}

  const Type* query(int64_t b, int64_t index) const {
    const auto [head, token] = head_and_token(call_, index, call_.q_heads / blocks_.kv_heads);
    return at<const Type>(call_.query, b, head, token);
  }

  // Queries of one row of the batch as `score_tile` takes them; their bytes.
  int64_t query_bytes() const { return round_up(queries_ * query_stride_ * 4, 64); }
  void prepare(int64_t b, float* prepared) const {
    for (int64_t i = 0; i < queries_; ++i) {
      prepare_query<Element>(query(b, i), static_cast<int>(blocks_.keys.dim), prepared + i * query_stride_);
    }
  }

  Tile<Element> tile(int64_t block, const VisibleBlock& visible, int64_t h) const {
    const Strided &keys = blocks_.keys.pool, &values = blocks_.values.pool;
    return {{at<const Type>(keys, block, h, visible.slot), keys.token_stride},
            {at<const Type>(values, block, h, visible.slot), values.token_stride},
            visible.first,
            visible.tokens,
            visible.masked,
            0,
            0};
  }

  // Attends one tile by all queries of its kv head. Compiled once, for both kinds of layers (decode.cpp).
  void attend(int64_t b, int64_t h, Tile<Element> tile, const float* prepared, const Partial& into) const;

 private:
  const Blocks& blocks_;
  const Call& call_;
  TileAttention tiles_;
  int64_t queries_, query_stride_;
};

}  // namespace paged
