// Blocks whose K and V are in the model's dtype.
#pragma once

#include "attention.h"

namespace paged {

// Queries of one row of the batch as `score_tile<Row>` takes them.
template <class Row>
std::int64_t dense_query_bytes(const Blocks& blocks, const Call& call) {
  return round_up(call.q_heads * call.q_tokens * prepared_query_floats<Row>(blocks.head_dim) * 4, 64);
}

template <class Row>
const typename Row::Element* query_of(const Blocks& blocks, const Call& call, std::int64_t b,
                                      std::int64_t row) {
  const auto [head, token] = head_and_token(call, row, call.q_heads / blocks.kv_heads);
  return reinterpret_cast<const typename Row::Element*>(call.query) + b * call.query_batch_stride +
         head * call.query_head_stride + token * call.query_token_stride;
}

template <class Row>
void prepare_dense_queries(const Blocks& blocks, const Call& call, std::int64_t b, float* queries) {
  for (std::int64_t row = 0; row < call.q_heads * call.q_tokens; ++row) {
    prepare_query<Row>(query_of<Row>(blocks, call, b, row), static_cast<int>(blocks.head_dim),
                       queries + row * prepared_query_floats<Row>(blocks.head_dim));
  }
}

template <class Row>
Tile<Row> dense_tile(const Blocks& blocks, std::int64_t slot_of_pool, const VisibleBlock& block,
                     std::int64_t h) {
  using Element = typename Row::Element;
  const Element* keys = reinterpret_cast<const Element*>(blocks.keys) +
                        slot_of_pool * blocks.key_block_stride + h * blocks.key_head_stride +
                        block.slot * blocks.key_token_stride;
  const Element* values = reinterpret_cast<const Element*>(blocks.values) +
                          slot_of_pool * blocks.value_block_stride + h * blocks.value_head_stride +
                          block.slot * blocks.value_token_stride;
  return {keys, values, block.first, block.tokens, block.masked, 0, 0};
}

// Attends one tile by all query rows of its kv head. Compiled once, for both kinds of layers (attention.cpp).
template <class Row>
void attend_dense_tile(const TileAttention& tiles, const Blocks& blocks, const Call& call, std::int64_t b,
                       std::int64_t h, Tile<Row> tile, const float* queries, const Partial& result);

}  // namespace paged
