// Attention over the tiles of records: codes are multiplied as they are, and scales are folded into queries,
// scores and weights.
#pragma once

#include "attention.h"
#include "codes.h"
#include "rotation.h"
#include "spread.h"

namespace paged {

// How codes are read.
enum class Reading {
  kFloats,  // a tile is decoded to floats first
  kInt8,    // rows of bytes, widened in registers
  kFp8,
  kBytes,  // dot products on bytes
  kNibbles,
};

inline Reading reading_of(std::int64_t codec, std::int64_t dim, bool is_values) {
#if defined(PAGED_HAS_DOTS)
  if (dim <= kMaxIntegerDim) {
    if (codec == kInt8Token) return Reading::kBytes;
    if (codec == (is_values ? kInt4Token : kInt4Channel)) return Reading::kNibbles;
  }
#else
  (void)dim, (void)is_values;
#endif
  if (codec == kInt8Token) return Reading::kInt8;
  return codec == kFp8Token ? Reading::kFp8 : Reading::kFloats;
}

inline Blocks with_strides(Blocks blocks, std::int64_t key_token_stride, std::int64_t value_token_stride) {
  blocks.key_token_stride = key_token_stride;
  blocks.value_token_stride = value_token_stride;
  return blocks;
}

inline Call with_scale(Call call, double scale) {
  call.scale = scale;
  return call;
}

// One block and head.
struct RecordTile {
  Stored keys, values;
  std::int64_t slot, first;  // of the first token: its slot and its column
  int tokens;
  bool masked;
  std::int64_t prefetch_bytes;  // to the record that is read next
};

// A thread's working memory.
struct TileRoom {
  float* queries;  // of all rows, times the scale, rotated where K are
  char* integer_queries;
  float* keys;    // a tile of floats
  float* values;  // a tile of floats, or of spread bytes
  float* params;  // of one block, and room for one query
};

class RecordTiles {
 public:
  RecordTiles(const Blocks& blocks, const Call& call)
      : blocks_(blocks),
        rows_(call.q_heads * call.q_tokens),
        rows_per_head_(rows_ / blocks.kv_heads),
        key_stride_(round_up(blocks.head_dim, kPair)),
        value_stride_(round_up(blocks.v_head_dim, kPair)),
        query_stride_(round_up(blocks.head_dim, 64)),
        scratch_blocks_(with_strides(blocks, key_stride_, value_stride_)),
        unscaled_call_(with_scale(call, 1.0)),
        tiles_(scratch_blocks_, unscaled_call_),
        key_reading_(reading_of(blocks.records.keys.codec, blocks.head_dim, false)),
        value_reading_(reading_of(blocks.records.values.codec, blocks.v_head_dim, true)),
        params_bytes_(blocks.records.bytes - blocks.records.keys.params) {}

  // Floats of a query; past the head dim they are 0.
  std::int64_t query_stride() const { return query_stride_; }

  // Sets `room` to the parts of a thread's memory; returns their size.
  std::int64_t layout(char* memory, TileRoom& room) const {
    std::int64_t at = 0;
    const auto take = [&](std::int64_t bytes) {
      char* taken = memory + at;
      at += round_up(bytes, 64);
      return taken;
    };
    room.queries = reinterpret_cast<float*>(take(rows_ * query_stride_ * 4));
    room.integer_queries = take(integer_query_bytes());
    const bool wide_keys = key_reading_ == Reading::kFloats;
    room.keys = reinterpret_cast<float*>(take(wide_keys ? blocks_.block_size * key_stride_ * 4 : 0));
    room.values = reinterpret_cast<float*>(take(value_bytes()));
    room.params = reinterpret_cast<float*>(take((params_floats() + query_stride_) * 4));
    return at;
  }

  // Completes one of `room.queries`, which is a query times the scale.
  void prepare_query(std::int64_t row, const TileRoom& room) const {
    float* query = room.queries + row * query_stride_;
    if (is_rotated(blocks_.records.keys.codec)) rotate(query, blocks_.head_dim);
#if defined(PAGED_HAS_DOTS)
    if (key_reading_ == Reading::kBytes) {
      prepare_byte_query(query, blocks_.head_dim, room.integer_queries + row * kQueryBytes);
    }
#endif
  }

  // Attends one tile by all query rows of its kv head. Not inlined, so that it is compiled once for all
  // dtypes.
  __attribute__((noinline)) void attend(std::int64_t b, std::int64_t h, RecordTile tile, const TileRoom& room,
                                        const Partial& result) const {
    // Parameters come last in a record, those of V after those of K.
    prefetch_lines(moved(tile.keys.params, tile.prefetch_bytes), params_bytes_);
    if (key_reading_ == Reading::kFloats) decode(tile.keys, tile, key_stride_, room.params, room.keys);
    read_values(tile, room);
    if (key_reading_ == Reading::kNibbles) widen_block_params(tile.keys, room.params);
    by_passes(rows_per_head_, [&](std::int64_t first, auto count) {
      constexpr int R = decltype(count)::value;
      const std::int64_t row = h * rows_per_head_ + first;
      const Rows rows = {b,
                         h,
                         first,
                         room.queries + row * query_stride_,
                         result.sums + row * value_stride_,
                         result.softmax + row};
      alignas(64) float scores[R * kScoreStride];
      score<R>(tile, room, row, scores);
      const bool hidden = tiles_.template weigh<R>(scores, tile.first, tile.tokens, tile.masked, rows);
      add<R>(tile, room, rows, hidden, scores);
      tile.prefetch_bytes = 0;
    });
  }

 private:
  std::int64_t params_floats() const { return 2 * std::max(blocks_.head_dim, blocks_.v_head_dim); }

  std::int64_t integer_query_bytes() const {
#if defined(PAGED_HAS_DOTS)
    if (key_reading_ == Reading::kBytes) return rows_ * kQueryBytes;
    if (key_reading_ == Reading::kNibbles) return kMaxRows * kQueryBytes;  // made for each block anew
#endif
    return 0;
  }

  std::int64_t value_bytes() const {
    switch (value_reading_) {
      case Reading::kFloats:
        return blocks_.block_size * value_stride_ * 4;
#if defined(PAGED_HAS_DOTS)
      case Reading::kBytes:
      case Reading::kNibbles:
        return spread_bytes(blocks_.block_size, blocks_.v_head_dim);
#endif
      default:
        return 0;
    }
  }

  static void decode(const Stored& s, const RecordTile& tile, std::int64_t stride, float* params,
                     float* out) {
    widen_block_params(s, params);
    for (int t = 0; t < tile.tokens; ++t) {
      prefetch_piece(moved(s.row(tile.slot + t), tile.prefetch_bytes), static_cast<int>(s.row_bytes()), 0);
      decode_token(s, tile.slot + t, params, out + t * stride);
    }
  }

  // What is done with the values of a tile before any query.
  void read_values(const RecordTile& tile, const TileRoom& room) const {
    const Stored& values = tile.values;
    [[maybe_unused]] std::uint8_t* bytes = reinterpret_cast<std::uint8_t*>(room.values);
    switch (value_reading_) {
      case Reading::kFloats:
        decode(values, tile, value_stride_, room.params, room.values);
        break;
#if defined(PAGED_HAS_DOTS)
      case Reading::kBytes:
        spread_int8(values.row(tile.slot), values.dim, tile.tokens, bytes, tile.prefetch_bytes);
        break;
      case Reading::kNibbles:
        spread_nibbles(values.row(tile.slot), values.dim, tile.tokens, bytes, tile.prefetch_bytes);
        break;
#endif
      default:
        break;
    }
  }

  // scores[r * kScoreStride + t] = query `row` + r · key t
  template <int R>
  void score(const RecordTile& tile, const TileRoom& room, std::int64_t row, float* scores) const {
    const Stored& keys = tile.keys;
    const float* queries = room.queries + row * query_stride_;
    const int dim = static_cast<int>(keys.dim);
    switch (key_reading_) {
      case Reading::kFloats:
        score_tile<Float32, R>(queries, query_stride_, room.keys, key_stride_, tile.tokens, dim, scores,
                               kScoreStride, 0);
        break;
      case Reading::kFp8:
        score_tile<Fp8, R>(queries, query_stride_, keys.row(tile.slot), dim, tile.tokens, dim, scores,
                           kScoreStride, tile.prefetch_bytes);
        scale_scores<R>(keys.params + tile.slot, Fp8::kUnit, tile.tokens, scores);
        break;
#if defined(PAGED_HAS_DOTS)
      case Reading::kBytes: {
        const char* integers = room.integer_queries + row * kQueryBytes;
        score_codes<R, false>(integers, keys.row(tile.slot), dim, tile.tokens,
                              reinterpret_cast<std::int32_t*>(scores), tile.prefetch_bytes);
        scale_integers<R>(keys.params + tile.slot, integers, tile.tokens, scores);
        break;
      }
      case Reading::kNibbles:
        score_channels<R>(tile, room, queries, scores);
        break;
#endif
      default:
        score_tile<Int8, R>(queries, query_stride_, keys.row(tile.slot), dim, tile.tokens, dim, scores,
                            kScoreStride, tile.prefetch_bytes);
        scale_scores<R>(keys.params + tile.slot, 1.0f, tile.tokens, scores);
        break;
    }
  }

  // Per-token scales of K multiply the scores.
  template <int R>
  static void scale_scores(const std::uint16_t* scales, float unit, int tokens, float* scores) {
    for (int t = 0; t < tokens; ++t) {
      const float scale = Float16::to_float(scales[t]) * unit;
      for (int r = 0; r < R; ++r) scores[r * kScoreStride + t] *= scale;
    }
  }

  // Per-token scales of V multiply the weights; a weight of 0 stays 0 whatever the scale of its token is.
  template <int R>
  static void scale_weights(const std::uint16_t* scales, float unit, int tokens, float* weights) {
    for (int t = 0; t < tokens; ++t) {
      const float scale = Float16::to_float(scales[t]) * unit;
      for (int r = 0; r < R; ++r) {
        float& weight = weights[r * kScoreStride + t];
        weight = weight == 0.0f ? 0.0f : weight * scale;
      }
    }
  }

#if defined(PAGED_HAS_DOTS)
  // The same of integers that `score_codes` has left, of queries at `integers`.
  template <int R>
  static void scale_integers(const std::uint16_t* scales, const char* integers, int tokens, float* scores) {
    for (int t = 0; t < tokens; t += kLanes) {
      const __mmask16 mask = first_lanes(tokens - t);
      const Vec scale = (Vec)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, scales + t));
      PAGED_UNROLL
      for (int r = 0; r < R; ++r) {
        const IntegerQuery query = integer_query(integers + r * kQueryBytes);
        float* at = scores + r * kScoreStride + t;
        const __m512i sum = _mm512_sub_epi32(_mm512_loadu_si512(at), _mm512_set1_epi32(128 * query.sum));
        paged::store(at, (Vec)_mm512_cvtepi32_ps(sum) * (scale * query.unit));
      }
    }
  }

  // K with a scale and a zero per channel: scales go into the queries, zeros become one number a query.
  template <int R>
  void score_channels(const RecordTile& tile, const TileRoom& room, const float* queries,
                      float* scores) const {
    const Stored& keys = tile.keys;
    const std::int64_t dim = keys.dim;
    const float* scales = room.params;
    const float* zeros = room.params + dim;
    float* scaled = room.params + params_floats();
    float units[R], offsets[R];
    for (int r = 0; r < R; ++r) {
      const float* query = queries + r * query_stride_;
      char* integers = room.integer_queries + r * kQueryBytes;
      Vec offset = {};
      for (std::int64_t i = 0; i < dim; i += kLanes) {
        const __mmask16 mask = first_lanes(dim - i);
        const __m512 q = (__m512)load(query + i);
        paged::store(scaled + i, (Vec)_mm512_mul_ps(q, _mm512_maskz_loadu_ps(mask, scales + i)));
        offset = offset + (Vec)_mm512_mul_ps(q, _mm512_maskz_loadu_ps(mask, zeros + i));
      }
      offsets[r] = sum_of(offset);
      prepare_nibble_query(scaled, dim, integers);
      units[r] = integer_query(integers).unit;
    }
    std::int32_t* sums = reinterpret_cast<std::int32_t*>(scores);
    score_codes<R, true>(room.integer_queries, keys.row(tile.slot), keys.row_bytes(), tile.tokens, sums,
                         tile.prefetch_bytes);
    for (int r = 0; r < R; ++r) {
      float* row = scores + r * kScoreStride;
      for (int t = 0; t < tile.tokens; t += kLanes) {
        paged::store(row + t, (Vec)_mm512_cvtepi32_ps(_mm512_loadu_si512(row + t)) * units[r] + offsets[r]);
      }
    }
  }
#endif

  // Adds the weighted values to the sums. `weights` are used up.
  template <int R>
  void add(const RecordTile& tile, const TileRoom& room, const Rows& rows, bool hidden,
           float* weights) const {
    const Stored& values = tile.values;
    const std::uint16_t* scales = values.params + tile.slot;
    const int dim = static_cast<int>(values.dim);
    switch (value_reading_) {
      case Reading::kFloats: {
        const Tile<Float32> floats = {nullptr, room.values, tile.first, tile.tokens, tile.masked, 0, 0};
        tiles_.template add<Float32, R>(weights, hidden, floats, rows);
        break;
      }
      case Reading::kFp8:
        scale_weights<R>(scales, Fp8::kUnit, tile.tokens, weights);
        add_values<Fp8, R>(weights, kScoreStride, values.row(tile.slot), dim, tile.tokens, dim, rows.sums,
                           value_stride_, tile.prefetch_bytes);
        break;
#if defined(PAGED_HAS_DOTS)
      case Reading::kBytes:
      case Reading::kNibbles: {
        ByteWeights<R> bytes;
        bytes.set(weights, scales, value_reading_ == Reading::kNibbles ? scales + values.block_size : nullptr,
                  tile.tokens);
        add_spread<R>(bytes, reinterpret_cast<const std::uint8_t*>(room.values), dim, tile.tokens, rows.sums,
                      value_stride_);
        break;
      }
#endif
      default:
        scale_weights<R>(scales, 1.0f, tile.tokens, weights);
        add_values<Int8, R>(weights, kScoreStride, values.row(tile.slot), dim, tile.tokens, dim, rows.sums,
                            value_stride_, tile.prefetch_bytes);
        break;
    }
  }

  const Blocks& blocks_;
  std::int64_t rows_, rows_per_head_, key_stride_, value_stride_, query_stride_;
  Blocks scratch_blocks_;  // a tile of floats, as `tiles_` is to see it
  Call unscaled_call_;     // queries have taken the scale in
  TileAttention tiles_;
  Reading key_reading_, value_reading_;
  std::int64_t params_bytes_;  // of a record
};

}  // namespace paged
