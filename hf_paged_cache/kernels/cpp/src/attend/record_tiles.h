// Attention over tiles of records: codes as they are; scales go into queries, scores and weights.
#pragma once

#include "../storage/codes.h"
#include "../storage/hadamard.h"
#include "spread.h"

namespace paged {

// How codes are read.
enum class Reading {
  kFloats,  // a tile is decoded to floats first
  kInt8,    // bytes, widened in registers
  kFp8,
  kBytes,  // dot products on bytes
  kNibbles,
};

inline Reading reading_of(int64_t codec, [[maybe_unused]] int64_t dim, [[maybe_unused]] bool is_values) {
#if defined(PAGED_HAS_DOTS)
  if (dim <= kMaxIntegerDim) {
    if (codec == kInt8Token) return Reading::kBytes;
    if (codec == (is_values ? kInt4Token : kInt4Channel)) return Reading::kNibbles;
  }
#endif
  if (codec == kInt8Token) return Reading::kInt8;
  return codec == kFp8Token ? Reading::kFp8 : Reading::kFloats;
}

inline bool are_dots(Reading reading) { return reading == Reading::kBytes || reading == Reading::kNibbles; }

// The tokens of one block and head that any query of the call may see.
struct RecordTile {
  VisibleBlock block;
  Stored keys, values;
  int64_t prefetch_bytes = 0;  // to the record that is read next
};

// A thread's working memory.
struct TileRoom {
  float* queries;         // all of a row of the batch, times the scale, rotated where K are
  char* integer_queries;  // the same; for nibbles those of one pass, made for each block anew
  float* keys;            // a tile of floats
  float* values;          // a tile of floats
  uint8_t* spread;        // a tile of spread bytes
  float* params;          // of one block
  float* scaled;          // one query
};

class RecordTiles {
 public:
  RecordTiles(const Blocks& blocks, const Call& call)
      : blocks_(blocks),
        queries_(call.q_heads * call.q_tokens),
        queries_per_head_(queries_ / blocks.kv_heads),
        key_stride_(round_up(blocks.keys.dim, kPair)),
        value_stride_(round_up(blocks.values.dim, kPair)),
        query_stride_(round_up(blocks.keys.dim, 64)),
        tiles_(blocks, call, 1.0f),
        key_reading_(reading_of(blocks.keys.codec, blocks.keys.dim, false)),
        value_reading_(reading_of(blocks.values.codec, blocks.values.dim, true)) {}

  // Floats of a query; past the head dim they are 0.
  int64_t query_stride() const { return query_stride_; }

  // Sets `room` to the pieces of a thread's memory; returns their size.
  int64_t layout(char* memory, TileRoom& room) const {
    int64_t at = 0;
    const auto take = [&](int64_t bytes) {
      char* taken = memory + at;
      at += round_up(bytes, 64);
      return taken;
    };
    const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
    const int64_t size = blocks_.block_size, dim = std::max(blocks_.keys.dim, blocks_.values.dim);
    room.queries = floats(queries_ * query_stride_);
    room.integer_queries =
        take(are_dots(key_reading_) ? std::max<int64_t>(queries_, kMaxQueries) * kQueryBytes : 0);
    room.keys = floats(key_reading_ == Reading::kFloats ? size * key_stride_ : 0);
    room.values = floats(value_reading_ == Reading::kFloats ? size * value_stride_ : 0);
    room.spread = reinterpret_cast<uint8_t*>(
        take(are_dots(value_reading_) ? spread_bytes(size, blocks_.values.dim) : 0));
    room.params = floats(2 * dim);
    room.scaled = floats(query_stride_);
    return at;
  }

  // Completes one of `room.queries`, which is a query times the scale.
  void prepare_query(int64_t index, const TileRoom& room) const {
    float* query = room.queries + index * query_stride_;
    if (is_rotated(blocks_.keys.codec)) rotate(query, blocks_.keys.dim);
#if defined(PAGED_HAS_DOTS)
    if (key_reading_ == Reading::kBytes) {
      prepare_integer_query<false>(query, blocks_.keys.dim, room.integer_queries + index * kQueryBytes);
    }
#endif
  }

  // Attends one tile by all queries of its kv head. Compiled once for all dtypes (attend_records.cpp).
  void attend(int64_t b, int64_t h, RecordTile tile, const TileRoom& room, const Partial& into) const;

 private:
  static void decode(const Stored& s, const RecordTile& tile, int64_t stride, float* params, float* out) {
    widen_block_params(s, params);
    for (int t = 0; t < tile.block.tokens; ++t) {
      const int64_t slot = tile.block.slot + t;
      prefetch_piece(moved(s.codes_of(slot), tile.prefetch_bytes), static_cast<int>(s.code_bytes()), 0);
      decode_token(s, slot, params, out + t * stride);
    }
  }

  // What is done with the values of a tile before any query.
  void read_values(const RecordTile& tile, const TileRoom& room) const {
    if (value_reading_ == Reading::kFloats) {
      decode(tile.values, tile, value_stride_, room.params, room.values);
    }
#if defined(PAGED_HAS_DOTS)
    const uint8_t* codes = tile.values.codes_of(tile.block.slot);
    if (value_reading_ == Reading::kBytes) {
      spread<false>(codes, tile.values.dim, tile.block.tokens, room.spread, tile.prefetch_bytes);
    } else if (value_reading_ == Reading::kNibbles) {
      spread<true>(codes, tile.values.dim, tile.block.tokens, room.spread, tile.prefetch_bytes);
    }
#endif
  }

  // scores[r * kScoreStride + t] = query r · key t.
  template <int R>
  void score(const RecordTile& tile, const TileRoom& room, const Queries& queries, float* scores) const {
#if defined(PAGED_HAS_DOTS)
    if (key_reading_ == Reading::kNibbles) return score_channels<R>(tile, room, queries.prepared, scores);
    if (key_reading_ == Reading::kBytes) {
      const int64_t index = queries.kv_head * queries_per_head_ + queries.first;
      return score_integers<R>(tile, room.integer_queries + index * kQueryBytes, scores);
    }
#endif
    if (key_reading_ == Reading::kFloats) {
      return score_tile<Float32, R>(queries.prepared, {room.keys, key_stride_}, tile.block.tokens,
                                    static_cast<int>(tile.keys.dim), scores, 0);
    }
    if (key_reading_ == Reading::kFp8) return score_bytes<Fp8, R>(tile, queries.prepared, scores);
    score_bytes<Int8, R>(tile, queries.prepared, scores);
  }

  // Per-token scales of K multiply the scores.
  template <class Code, int R>
  static void score_bytes(const RecordTile& tile, Vectors<const float> queries, float* scores) {
    const Vectors<const uint8_t> codes = {tile.keys.codes_of(tile.block.slot), tile.keys.dim};
    score_tile<Code, R>(queries, codes, tile.block.tokens, static_cast<int>(tile.keys.dim), scores,
                        tile.prefetch_bytes);
    for (int t = 0; t < tile.block.tokens; ++t) {
      const float scale = Float16::to_float(tile.keys.params[tile.block.slot + t]) * Code::kUnit;
      for (int r = 0; r < R; ++r) scores[r * kScoreStride + t] *= scale;
    }
  }

  // Per-token scales of V multiply the weights; a weight of 0 stays 0 whatever the scale of its token is.
  template <class Code, int R>
  static void add_bytes(const RecordTile& tile, float* weights, Vectors<float> sums) {
    for (int t = 0; t < tile.block.tokens; ++t) {
      const float scale = Float16::to_float(tile.values.params[tile.block.slot + t]) * Code::kUnit;
      for (int r = 0; r < R; ++r) {
        float& weight = weights[r * kScoreStride + t];
        weight = weight == 0.0f ? 0.0f : weight * scale;
      }
    }
    const Vectors<const uint8_t> codes = {tile.values.codes_of(tile.block.slot), tile.values.dim};
    add_values<Code, R>(weights, codes, tile.block.tokens, static_cast<int>(tile.values.dim), sums,
                        tile.prefetch_bytes);
  }

#if defined(PAGED_HAS_DOTS)
  // Integers of int8 times integers of queries, then both scales.
  template <int R>
  static void score_integers(const RecordTile& tile, const char* integers, float* scores) {
    const int tokens = tile.block.tokens;
    score_codes<R, false>(integers, tile.keys.codes_of(tile.block.slot), tile.keys.dim, tokens,
                          reinterpret_cast<int32_t*>(scores), tile.prefetch_bytes);
    for (int t = 0; t < tokens; t += kLanes) {
      const Vec scale = (Vec)widen_halves(tile.keys.params + tile.block.slot + t, first_lanes(tokens - t));
      PAGED_UNROLLED(r, R) {
        const IntegerQuery query = integer_query(integers + r * kQueryBytes);
        float* at = scores + r * kScoreStride + t;
        const __m512i sum = _mm512_sub_epi32(_mm512_loadu_si512(at), _mm512_set1_epi32(128 * query.sum));
        paged::store(at, (Vec)_mm512_cvtepi32_ps(sum) * (scale * query.unit));
      }
    }
  }

  // K with a scale and a zero per channel: scales go into the queries, zeros become one number a query.
  template <int R>
  void score_channels(const RecordTile& tile, const TileRoom& room, Vectors<const float> queries,
                      float* scores) const {
    const int64_t dim = tile.keys.dim;
    const float *scales = room.params, *zeros = scales + dim;
    float units[R], offsets[R];
    for (int r = 0; r < R; ++r) {
      const float* query = queries[r];
      char* integers = room.integer_queries + r * kQueryBytes;
      Vec offset = {};
      for (int64_t i = 0; i < dim; i += kLanes) {
        const __mmask16 mask = first_lanes(dim - i);
        const __m512 q = (__m512)load(query + i);
        paged::store(room.scaled + i, (Vec)_mm512_mul_ps(q, _mm512_maskz_loadu_ps(mask, scales + i)));
        offset = offset + (Vec)_mm512_mul_ps(q, _mm512_maskz_loadu_ps(mask, zeros + i));
      }
      offsets[r] = sum_of(offset);
      prepare_integer_query<true>(room.scaled, dim, integers);
      units[r] = integer_query(integers).unit;
    }
    score_codes<R, true>(room.integer_queries, tile.keys.codes_of(tile.block.slot), tile.keys.code_bytes(),
                         tile.block.tokens, reinterpret_cast<int32_t*>(scores), tile.prefetch_bytes);
    for (int r = 0; r < R; ++r) {
      float* own = scores + r * kScoreStride;
      for (int t = 0; t < tile.block.tokens; t += kLanes) {
        paged::store(own + t, (Vec)_mm512_cvtepi32_ps(_mm512_loadu_si512(own + t)) * units[r] + offsets[r]);
      }
    }
  }
#endif

  // Adds the weighted values to the sums. `weights` are used up.
  template <int R>
  void add(const RecordTile& tile, const TileRoom& room, const Queries& queries, bool hidden,
           float* weights) const {
#if defined(PAGED_HAS_DOTS)
    if (are_dots(value_reading_)) {
      const uint16_t* scales = tile.values.params + tile.block.slot;
      const uint16_t* zeros = value_reading_ == Reading::kNibbles ? scales + tile.values.block_size : nullptr;
      return add_spread<R>(ByteWeights<R>(weights, scales, zeros, tile.block.tokens), room.spread,
                           tile.values.dim, tile.block.tokens, queries.sums);
    }
#endif
    if (value_reading_ == Reading::kFp8) return add_bytes<Fp8, R>(tile, weights, queries.sums);
    if (value_reading_ == Reading::kInt8) return add_bytes<Int8, R>(tile, weights, queries.sums);
    const Tile<Float32> floats = {tile.block, {}, {room.values, value_stride_}};
    tiles_.template add<Float32, R>(weights, hidden, floats, queries);
  }

  const Blocks& blocks_;
  int64_t queries_, queries_per_head_, key_stride_, value_stride_, query_stride_;
  TileAttention tiles_;
  Reading key_reading_, value_reading_;
};

}  // namespace paged
