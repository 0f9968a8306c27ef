// Attention over layers with records.
//
// Where K are rotated so are the queries, once; where V are rotated the sum is rotated back, once. Residual
// blocks are attended as they are, to a partial of their own, which is merged at the end.
#include "dense_tiles.h"
#include "record_tiles.h"

namespace paged {
namespace {

template <class Element>
class RecordLayer {
 public:
  using Type = typename Element::Type;
  static constexpr int kPartials = 2;  // of records, of residual blocks

  RecordLayer(const Blocks& blocks, const Call& call)
      : blocks_(blocks),
        scale_(static_cast<float>(call.scale)),
        residual_(blocks, call),
        records_(blocks, call),
        queries_(call.q_heads * call.q_tokens),
        prepared_bytes_(residual_.query_bytes()) {}

  int64_t worker_bytes() const {
    TileRoom unused;
    return prepared_bytes_ + records_.layout(nullptr, unused);
  }

  void prepare(int64_t b, char* worker) const {
    TileRoom room;
    records_.layout(worker + prepared_bytes_, room);
    residual_.prepare(b, reinterpret_cast<float*>(worker));
    for (int64_t i = 0; i < queries_; ++i) {
      const Type* query = residual_.query(b, i);
      float* wide = room.queries + i * records_.query_stride();
      for (int64_t c = 0; c < blocks_.keys.dim; ++c) wide[c] = Element::to_float(query[c]) * scale_;
      for (int64_t c = blocks_.keys.dim; c < records_.query_stride(); ++c) wide[c] = 0.0f;
      records_.prepare_query(i, room);
    }
  }

  void attend(int64_t b, const VisibleBlock& block, const VisibleBlock* next, char* worker,
              const Partial& into) const {
    if (block.entry < kNullBlock) {
      const int64_t sums_stride = round_up(blocks_.values.dim, kPair);
      const Partial residual = {into.sums + queries_ * sums_stride, into.softmax + queries_};
      for (int64_t h = 0; h < blocks_.kv_heads; ++h) {
        residual_.attend(b, h, residual_.tile(residual_block(block.entry), block, h),
                         reinterpret_cast<const float*>(worker), residual);
      }
      return;
    }
    TileRoom room;
    records_.layout(worker + prepared_bytes_, room);
    for (int64_t h = 0; h < blocks_.kv_heads; ++h) {
      uint8_t* record = record_at(blocks_, block.entry, h);
      RecordTile tile = {stored_in(blocks_, blocks_.keys, record),
                         stored_in(blocks_, blocks_.values, record),
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
      records_.attend(b, h, tile, room, into);
    }
  }

  // The sums of records are in memory order, those of residual blocks in the lane order of the dtype.
  void store(float* sums, int64_t stride, float factor, Type* out) const {
    if (is_rotated(blocks_.values.codec)) unrotate(sums, blocks_.values.dim);
    float* residual = sums + stride;
    for (int64_t i = 0; i < round_up(blocks_.values.dim, kPair); i += kPair) {
      const Pair v = Element::lanes_of(sums + i);
      paged::store(residual + i, load(residual + i) + v.a);
      paged::store(residual + i + kLanes, load(residual + i + kLanes) + v.b);
    }
    store_values<Element>(residual, factor, static_cast<int>(blocks_.values.dim), out);
  }

 private:
  const Blocks& blocks_;
  const float scale_;
  DenseTiles<Element> residual_;
  RecordTiles records_;
  int64_t queries_, prepared_bytes_;
};

}  // namespace

int decode_records(const Blocks& blocks, const Call& call, Scratch& scratch) {
  return with_element_type(blocks.element_type, [&](auto element) {
    return Attention<RecordLayer<decltype(element)>>(blocks, call).run(scratch);
  });
}

}  // namespace paged
