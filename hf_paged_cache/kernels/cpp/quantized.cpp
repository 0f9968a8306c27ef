// Attention over layers with records.
//
// Where K are rotated so are the queries, once; where V are rotated the sum is rotated back, once. Blocks in
// the model's dtype are attended as they are, to a result of their own, which is merged at the end.
#include "quantized.h"

#include "dense.h"
#include "record_tiles.h"

namespace paged {
namespace {

template <class Row>
class RecordLayer {
 public:
  using Element = typename Row::Element;
  static constexpr int kParts = 2;  // of records, of blocks in the model's dtype

  RecordLayer(const Blocks& blocks, const Call& call)
      : blocks_(blocks), call_(call), dense_(blocks, call), records_(blocks, call) {
    rows_ = call.q_heads * call.q_tokens;
    dense_query_bytes_ = dense_query_bytes<Row>(blocks, call);
  }

  std::int64_t worker_bytes() const {
    TileRoom unused;
    return dense_query_bytes_ + records_.layout(nullptr, unused);
  }

  bool holds(std::int32_t entry) const {
    return entry >= 0 ? entry < blocks_.records.num_records : dense_slot(entry) < blocks_.num_blocks;
  }

  void prepare(std::int64_t b, char* worker) const {
    TileRoom room;
    records_.layout(worker + dense_query_bytes_, room);
    const float scale = static_cast<float>(call_.scale);
    prepare_dense_queries<Row>(blocks_, call_, b, reinterpret_cast<float*>(worker));
    for (std::int64_t row = 0; row < rows_; ++row) {
      const Element* query = query_of<Row>(blocks_, call_, b, row);
      float* wide = room.queries + row * records_.query_stride();
      for (std::int64_t i = 0; i < blocks_.head_dim; ++i) wide[i] = Row::to_float(query[i]) * scale;
      for (std::int64_t i = blocks_.head_dim; i < records_.query_stride(); ++i) wide[i] = 0.0f;
      records_.prepare_query(row, room);
    }
  }

  void attend(std::int64_t b, const VisibleBlock& block, const VisibleBlock* next, char* worker,
              const Partial& result) const {
    if (block.entry < kNullBlock) {
      const std::int64_t sums_stride = round_up(blocks_.v_head_dim, kPair);
      const Partial dense = {result.sums + rows_ * sums_stride, result.softmax + rows_};
      for (std::int64_t h = 0; h < blocks_.kv_heads; ++h) {
        attend_dense_tile<Row>(dense_, blocks_, call_, b, h,
                               dense_tile<Row>(blocks_, dense_slot(block.entry), block, h),
                               reinterpret_cast<const float*>(worker), dense);
      }
      return;
    }
    TileRoom room;
    records_.layout(worker + dense_query_bytes_, room);
    for (std::int64_t h = 0; h < blocks_.kv_heads; ++h) {
      std::uint8_t* record = record_at(blocks_, block.entry, h);
      RecordTile tile = {stored_keys(blocks_, record),
                         stored_values(blocks_, record),
                         block.slot,
                         block.first,
                         block.tokens,
                         block.masked,
                         0};
      if (h + 1 < blocks_.kv_heads) {
        tile.prefetch_bytes = blocks_.records.head_stride;
      } else if (next != nullptr && next->entry >= 0) {
        tile.prefetch_bytes = bytes_between(record, record_at(blocks_, next->entry, 0));
      }
      records_.attend(b, h, tile, room, result);
    }
  }

  // Part 0 of the sums is of records and in memory order, part 1 in the lane order of the dtype.
  void store(float* sums, std::int64_t part_stride, float factor, Element* out) const {
    if (is_rotated(blocks_.records.values.codec)) unrotate(sums, blocks_.v_head_dim);
    float* dense = sums + part_stride;
    for (std::int64_t i = 0; i < round_up(blocks_.v_head_dim, kPair); i += kPair) {
      const Pair v = Row::lanes_of(sums + i);
      paged::store(dense + i, load(dense + i) + v.a);
      paged::store(dense + i + kLanes, load(dense + i + kLanes) + v.b);
    }
    store_values<Row>(dense, factor, static_cast<int>(blocks_.v_head_dim), out);
  }

 private:
  const Blocks& blocks_;
  const Call& call_;
  TileAttention dense_;
  RecordTiles records_;
  std::int64_t rows_, dense_query_bytes_;
};

}  // namespace

int decode_records(const Blocks& blocks, const Call& call, Scratch& scratch) {
  return with_element_type(blocks.element_type, [&](auto row) {
    return Attention<RecordLayer<decltype(row)>>(blocks, call).run(scratch);
  });
}

}  // namespace paged
