// Attention over the tiles of records: codes are multiplied as they are, and scales are folded into queries,
// scores and weights.
#pragma once

#include "../storage/codes.h"
#include "../storage/hadamard.h"
#include "splits.h"
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

// One block and head.
struct RecordTile {
  Stored keys, values;
  int64_t slot, first;  // of the first token: its slot and its column
  int tokens;
  bool masked;
  int64_t prefetch_bytes;  // to the record that is read next
};

// A thread's working memory.
struct TileRoom {
  float* queries;  // all of a row of the batch, times the scale, rotated where K are
  char* integer_queries;
  float* keys;    // a tile of floats
  float* values;  // a tile of floats, or of spread bytes
  float* params;  // of one block, and room for one query
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
        value_reading_(reading_of(blocks.values.codec, blocks.values.dim, true)),
        params_bytes_(blocks.records.bytes - blocks.keys.params) {}

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
    room.queries = reinterpret_cast<float*>(take(queries_ * query_stride_ * 4));
    room.integer_queries = take(integer_query_bytes());
    const bool wide_keys = key_reading_ == Reading::kFloats;
    room.keys = reinterpret_cast<float*>(take(wide_keys ? blocks_.block_size * key_stride_ * 4 : 0));
    room.values = reinterpret_cast<float*>(take(value_bytes()));
    room.params = reinterpret_cast<float*>(take((params_floats() + query_stride_) * 4));
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

  // Attends one tile by all queries of its kv head. Not inlined, so that it is compiled once for all dtypes.
  __attribute__((noinline)) void attend(int64_t b, int64_t h, RecordTile tile, const TileRoom& room,
                                        const Partial& into) const {
    // Parameters come last in a record, those of V after those of K.
    prefetch_lines(moved(tile.keys.params, tile.prefetch_bytes), params_bytes_);
    if (key_reading_ == Reading::kFloats) decode(tile.keys, tile, key_stride_, room.params, room.keys);
    read_values(tile, room);
    if (key_reading_ == Reading::kNibbles) widen_block_params(tile.keys, room.params);
    by_passes(queries_per_head_, [&](int64_t first, auto count) {
      constexpr int R = decltype(count)::value;
      const int64_t query = h * queries_per_head_ + first;
      const Queries queries = {b,
                               h,
                               first,
                               {room.queries + query * query_stride_, query_stride_},
                               {into.sums + query * value_stride_, value_stride_},
                               into.softmax + query};
      alignas(64) float scores[R * kScoreStride];
      score<R>(tile, room, query, queries.prepared, scores);
      const bool hidden =
          tiles_.template to_weights<R>(scores, tile.first, tile.tokens, tile.masked, queries);
      add<R>(tile, room, queries, hidden, scores);
      tile.prefetch_bytes = 0;
    });
  }

 private:
  int64_t params_floats() const { return 2 * std::max(blocks_.keys.dim, blocks_.values.dim); }

  int64_t integer_query_bytes() const {
#if defined(PAGED_HAS_DOTS)
    if (key_reading_ == Reading::kBytes) return queries_ * kQueryBytes;
    if (key_reading_ == Reading::kNibbles) return kMaxQueries * kQueryBytes;  // made for each block anew
#endif
    return 0;
  }

  int64_t value_bytes() const {
#if defined(PAGED_HAS_DOTS)
    if (value_reading_ == Reading::kBytes || value_reading_ == Reading::kNibbles) {
      return spread_bytes(blocks_.block_size, blocks_.values.dim);
    }
#endif
    return value_reading_ == Reading::kFloats ? blocks_.block_size * value_stride_ * 4 : 0;
  }

  static void decode(const Stored& s, const RecordTile& tile, int64_t stride, float* params, float* out) {
    widen_block_params(s, params);
    for (int t = 0; t < tile.tokens; ++t) {
      prefetch_piece(moved(s.codes_of(tile.slot + t), tile.prefetch_bytes), static_cast<int>(s.code_bytes()),
                     0);
      decode_token(s, tile.slot + t, params, out + t * stride);
    }
  }

  // What is done with the values of a tile before any query.
  void read_values(const RecordTile& tile, const TileRoom& room) const {
    if (value_reading_ == Reading::kFloats) {
      decode(tile.values, tile, value_stride_, room.params, room.values);
    }
#if defined(PAGED_HAS_DOTS)
    const uint8_t* codes = tile.values.codes_of(tile.slot);
    uint8_t* bytes = reinterpret_cast<uint8_t*>(room.values);
    if (value_reading_ == Reading::kBytes) {
      spread_int8(codes, tile.values.dim, tile.tokens, bytes, tile.prefetch_bytes);
    } else if (value_reading_ == Reading::kNibbles) {
      spread_nibbles(codes, tile.values.dim, tile.tokens, bytes, tile.prefetch_bytes);
    }
#endif
  }

  // scores[r * kScoreStride + t] = query r · key t, of R queries from number `query` on.
  template <int R>
  void score(const RecordTile& tile, const TileRoom& room, [[maybe_unused]] int64_t query,
             Vectors<const float> queries, float* scores) const {
    const int dim = static_cast<int>(tile.keys.dim);
#if defined(PAGED_HAS_DOTS)
    if (key_reading_ == Reading::kNibbles) return score_channels<R>(tile, room, queries, scores);
    if (key_reading_ == Reading::kBytes) {
      const char* integers = room.integer_queries + query * kQueryBytes;
      score_codes<R, false>(integers, tile.keys.codes_of(tile.slot), dim, tile.tokens,
                            reinterpret_cast<int32_t*>(scores), tile.prefetch_bytes);
      return scale_integers<R>(tile.keys.params + tile.slot, integers, tile.tokens, scores);
    }
#endif
    if (key_reading_ == Reading::kFloats) {
      return score_tile<Float32, R>(queries, {room.keys, key_stride_}, tile.tokens, dim, scores, 0);
    }
    if (key_reading_ == Reading::kFp8) return score_bytes<Fp8, R>(tile, queries, scores);
    score_bytes<Int8, R>(tile, queries, scores);
  }

  // Per-token scales of K multiply the scores.
  template <class Code, int R>
  static void score_bytes(const RecordTile& tile, Vectors<const float> queries, float* scores) {
    const Vectors<const uint8_t> codes = {tile.keys.codes_of(tile.slot), tile.keys.dim};
    score_tile<Code, R>(queries, codes, tile.tokens, static_cast<int>(tile.keys.dim), scores,
                        tile.prefetch_bytes);
    for (int t = 0; t < tile.tokens; ++t) {
      const float scale = Float16::to_float(tile.keys.params[tile.slot + t]) * Code::kUnit;
      for (int r = 0; r < R; ++r) scores[r * kScoreStride + t] *= scale;
    }
  }

  // Per-token scales of V multiply the weights; a weight of 0 stays 0 whatever the scale of its token is.
  template <class Code, int R>
  static void add_bytes(const RecordTile& tile, float* weights, Vectors<float> sums) {
    for (int t = 0; t < tile.tokens; ++t) {
      const float scale = Float16::to_float(tile.values.params[tile.slot + t]) * Code::kUnit;
      for (int r = 0; r < R; ++r) {
        float& weight = weights[r * kScoreStride + t];
        weight = weight == 0.0f ? 0.0f : weight * scale;
      }
    }
    const Vectors<const uint8_t> codes = {tile.values.codes_of(tile.slot), tile.values.dim};
    add_values<Code, R>(weights, codes, tile.tokens, static_cast<int>(tile.values.dim), sums,
                        tile.prefetch_bytes);
  }

#if defined(PAGED_HAS_DOTS)
  // The same of integers that `score_codes` has left, of queries at `integers`.
  template <int R>
  static void scale_integers(const uint16_t* scales, const char* integers, int tokens, float* scores) {
    for (int t = 0; t < tokens; t += kLanes) {
      const __mmask16 mask = first_lanes(tokens - t);
      const Vec scale = (Vec)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, scales + t));
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
    const Stored& keys = tile.keys;
    const int64_t dim = keys.dim;
    const float* scales = room.params;
    const float* zeros = room.params + dim;
    float* scaled = room.params + params_floats();
    float units[R], offsets[R];
    for (int r = 0; r < R; ++r) {
      const float* query = queries[r];
      char* integers = room.integer_queries + r * kQueryBytes;
      Vec offset = {};
      for (int64_t i = 0; i < dim; i += kLanes) {
        const __mmask16 mask = first_lanes(dim - i);
        const __m512 q = (__m512)load(query + i);
        paged::store(scaled + i, (Vec)_mm512_mul_ps(q, _mm512_maskz_loadu_ps(mask, scales + i)));
        offset = offset + (Vec)_mm512_mul_ps(q, _mm512_maskz_loadu_ps(mask, zeros + i));
      }
      offsets[r] = sum_of(offset);
      prepare_integer_query<true>(scaled, dim, integers);
      units[r] = integer_query(integers).unit;
    }
    int32_t* sums = reinterpret_cast<int32_t*>(scores);
    score_codes<R, true>(room.integer_queries, keys.codes_of(tile.slot), keys.code_bytes(), tile.tokens, sums,
                         tile.prefetch_bytes);
    for (int r = 0; r < R; ++r) {
      float* own = scores + r * kScoreStride;
      for (int t = 0; t < tile.tokens; t += kLanes) {
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
    if (value_reading_ == Reading::kBytes || value_reading_ == Reading::kNibbles) {
      const uint16_t* scales = tile.values.params + tile.slot;
      ByteWeights<R> bytes;
      bytes.set(weights, scales,
                value_reading_ == Reading::kNibbles ? scales + tile.values.block_size : nullptr, tile.tokens);
      return add_spread<R>(bytes, reinterpret_cast<const uint8_t*>(room.values), tile.values.dim, tile.tokens,
                           queries.sums);
    }
#endif
    if (value_reading_ == Reading::kFp8) return add_bytes<Fp8, R>(tile, weights, queries.sums);
    if (value_reading_ == Reading::kInt8) return add_bytes<Int8, R>(tile, weights, queries.sums);
    const Tile<Float32> floats = {{}, {room.values, value_stride_}, tile.first, tile.tokens, tile.masked, 0,
                                  0};
    tiles_.template add<Float32, R>(weights, hidden, floats, queries);
  }

  const Blocks& blocks_;
  int64_t queries_, queries_per_head_, key_stride_, value_stride_, query_stride_;
  TileAttention tiles_;
  Reading key_reading_, value_reading_;
  int64_t params_bytes_;  // of a record
};

}  // namespace paged
