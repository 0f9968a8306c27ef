// One layer's blocks, as a task attends them: blocks in the model's dtype, and records.
//
// Where K are rotated so are the queries, once; where V are rotated the sum is rotated back, once. The blocks
// in the model's dtype of a layer with records, its residual blocks, are attended to a partial of their own,
// which is merged at the end.
#pragma once

#include <utility>

#include "record_tiles.h"

namespace paged {

// A query is one query head of one token. They go by kv head, then token, then query head of the group.
inline std::pair<int64_t, int64_t> head_and_token(const Call& call, int64_t query, int64_t group) {
  const int64_t queries_per_head = group * call.q_tokens;
  const int64_t within = query % queries_per_head;
  return {query / queries_per_head * group + within % group, within / group};
}

template <class Element>
class Layer {
 public:
  using Type = typename Element::Type;

  Layer(const Blocks& blocks, const Call& call)
      : blocks_(blocks),
        call_(call),
        tiles_(blocks, call, static_cast<float>(call.scale)),
        records_(blocks, call),
        queries_(call.q_heads * call.q_tokens),
        query_stride_(prepared_query_floats<Element>(blocks.keys.dim)),
        query_bytes_(round_up(queries_ * query_stride_ * 4, 64)) {}

  // Partial results of a query: of records, if the layer has them, then of dense blocks.
  int kinds() const { return has_records(blocks_) ? 2 : 1; }

  // Working memory that a thread needs: queries for dense blocks, then the room for records.
  int64_t worker_bytes() const {
    TileRoom unused;
    return query_bytes_ + (has_records(blocks_) ? records_.layout(nullptr, unused) : 0);
  }

  // What is done once for a row of the batch.
  void prepare(int64_t b, char* worker) const {
    const int dim = static_cast<int>(blocks_.keys.dim);
    const float scale = static_cast<float>(call_.scale);
    float* prepared = reinterpret_cast<float*>(worker);
    TileRoom room = {};
    if (has_records(blocks_)) records_.layout(worker + query_bytes_, room);
    for (int64_t i = 0; i < queries_; ++i) {
      const auto [head, token] = head_and_token(call_, i, call_.q_heads / blocks_.kv_heads);
      const Type* query = at<const Type>(call_.query, b, head, token);
      prepare_query<Element>(query, dim, prepared + i * query_stride_);
      if (!has_records(blocks_)) continue;
      float* wide = room.queries + i * records_.query_stride();
      for (int64_t c = 0; c < dim; ++c) wide[c] = Element::to_float(query[c]) * scale;
      for (int64_t c = dim; c < records_.query_stride(); ++c) wide[c] = 0.0f;
      records_.prepare_query(i, room);
    }
  }

  // Attends a block with all heads; `next` is null or the block after it.
  void attend(int64_t b, const VisibleBlock& block, const VisibleBlock* next, char* worker,
              const Partial& into) const {
    if (is_dense(block)) {
      const int64_t before = (kinds() - 1) * queries_;
      const Partial own = {{into.sums[before], into.sums.stride}, into.softmax + before};
      attend_dense(b, block, next, reinterpret_cast<const float*>(worker), own);
    } else {
      attend_record(b, block, next, worker + query_bytes_, into);
    }
  }

  // A row of the output, from the merged sums of its partials, which are `stride` apart. Those of records are
  // in memory order, those of dense blocks in the lane order of the dtype.
  void store(float* sums, int64_t stride, float factor, Type* out) const {
    const int64_t dim = blocks_.values.dim;
    if (has_records(blocks_)) {
      if (is_rotated(blocks_.values.codec)) unrotate(sums, dim);
      float* dense = sums + stride;
      for (int64_t i = 0; i < round_up(dim, kPair); i += kPair) {
        const Pair v = Element::lanes_of(sums + i);
        paged::store(dense + i, load(dense + i) + v.a);
        paged::store(dense + i + kLanes, load(dense + i + kLanes) + v.b);
      }
      sums = dense;
    }
    for (int64_t c = 0; c < dim; c += kPair) {
      store_up_to<Element>(out + c, {load(sums + c) * factor, load(sums + c + kLanes) * factor}, dim - c);
    }
  }

 private:
  bool is_dense(const VisibleBlock& block) const { return !has_records(blocks_) || block.entry < kNullBlock; }

  Tile<Element> tile_of(const VisibleBlock& visible, int64_t h) const {
    const int64_t block = has_records(blocks_) ? residual_block(visible.entry) : visible.entry;
    const Strided &keys = blocks_.keys.pool, &values = blocks_.values.pool;
    return {visible,
            {at<const Type>(keys, block, h, visible.slot), keys.token_stride},
            {at<const Type>(values, block, h, visible.slot), values.token_stride}};
  }

  void attend_dense(int64_t b, const VisibleBlock& block, const VisibleBlock* next, const float* prepared,
                    const Partial& into) const {
    for (int64_t h = 0; h < blocks_.kv_heads; ++h) {
      Tile<Element> tile = tile_of(block, h);
      const bool last_head = h + 1 == blocks_.kv_heads;
      if (!last_head || (next != nullptr && is_dense(*next))) {
        const Tile<Element> after = last_head ? tile_of(*next, 0) : tile_of(block, h + 1);
        tile.key_prefetch_bytes = bytes_between(tile.keys.first, after.keys.first);
        tile.value_prefetch_bytes = bytes_between(tile.values.first, after.values.first);
      }
      attend_tile(b, h, tile, prepared, into);
    }
  }

  // One tile by all queries of its kv head. The first pass asks for the next tile.
  __attribute__((noinline)) void attend_tile(int64_t b, int64_t h, Tile<Element> tile, const float* prepared,
                                             const Partial& into) const {
    by_passes(queries_ / blocks_.kv_heads, b, h, {prepared, query_stride_}, into,
              [&](const Queries& queries, auto count) {
                tiles_.template attend<Element, decltype(count)::value>(tile, queries);
                tile.key_prefetch_bytes = tile.value_prefetch_bytes = 0;
              });
  }

  void attend_record(int64_t b, const VisibleBlock& block, const VisibleBlock* next, char* memory,
                     const Partial& into) const {
    TileRoom room;
    records_.layout(memory, room);
    for (int64_t h = 0; h < blocks_.kv_heads; ++h) {
      uint8_t* record = record_at(blocks_, block.entry, h);
      RecordTile tile = {block, stored_in(blocks_, blocks_.keys, record),
                         stored_in(blocks_, blocks_.values, record)};
      if (h + 1 < blocks_.kv_heads) {
        tile.prefetch_bytes = blocks_.records.head_stride;
      } else if (next != nullptr && next->entry >= 0) {
        tile.prefetch_bytes = bytes_between(record, record_at(blocks_, next->entry, 0));
      }
      records_.attend(b, h, tile, room, into);
    }
  }

  const Blocks& blocks_;
  const Call& call_;
  TileAttention tiles_;
  RecordTiles records_;
  int64_t queries_, query_stride_, query_bytes_;
};

}  // namespace paged
