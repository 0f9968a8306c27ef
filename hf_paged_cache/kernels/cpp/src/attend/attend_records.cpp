// One tile of records, attended by all queries of its kv head: compiled once for all dtypes.
#include "record_tiles.h"

namespace paged {

void RecordTiles::attend(int64_t b, int64_t h, RecordTile tile, const TileRoom& room,
                         const Partial& into) const {
  // Parameters come last in a record, those of V after those of K.
  prefetch_lines(moved(tile.keys.params, tile.prefetch_bytes), blocks_.records.bytes - blocks_.keys.params);
  if (key_reading_ == Reading::kFloats) decode(tile.keys, tile, key_stride_, room.params, room.keys);
  read_values(tile, room);
  if (key_reading_ == Reading::kNibbles) widen_block_params(tile.keys, room.params);
  by_passes(queries_per_head_, b, h, {room.queries, query_stride_}, into,
            [&](const Queries& queries, auto count) {
              constexpr int R = decltype(count)::value;
              alignas(64) float scores[R * kScoreStride];
              score<R>(tile, room, queries, scores);
              const bool hidden = tiles_.template to_weights<R>(scores, tile.block, queries);
              add<R>(tile, room, queries, hidden, scores);
              tile.prefetch_bytes = 0;
            });
}

}  // namespace paged
