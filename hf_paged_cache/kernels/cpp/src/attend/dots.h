// Dot products of keys, as bytes of records, with queries (AVX-512 VNNI); spread.h has those of values.
//
// A query becomes 16-bit integers relative to its largest channel, as two bytes: q = unit * (256 high + low).
// The instruction multiplies unsigned bytes with signed ones and adds four neighbours, so a dot product is
// two sums, of which the first is shifted by 8. All of it is exact in 32 bits for heads up to kMaxIntegerDim;
// only the rounding of the query is lost, at most half a unit, 1.6e-5 of its largest channel.
#pragma once

#include "../storage/codes.h"
#include "tile.h"

namespace paged {

constexpr int64_t kMaxIntegerDim = 512;
constexpr int kVecBytes = 64;

// Layout of a query: high bytes, low bytes, IntegerQuery. Of nibbles the channels of the low bits come first
// in each run of bytes, and those of the high bits in the middle of it. All at constant distances, which
// leaves registers to the loops that read them.
constexpr int64_t kTermBytes = kMaxIntegerDim;
constexpr int64_t kUpperBytes = kTermBytes / 2;
constexpr int64_t kQueryBytes = 2 * kTermBytes + kVecBytes;

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define PAGED_HAS_DOTS 1

constexpr float kQuerySteps = 32639.0f;  // 127 * 256 + 127
constexpr float kSmallestTop = 1e-30f;   // below it the inverse of a unit would overflow, and all is nothing

// What is kept of a query beside its bytes.
struct IntegerQuery {
  float unit;
  int32_t sum;  // of the integers, where they are multiplied with bytes
};

inline __mmask64 first_bytes(int64_t count) {
  return count >= kVecBytes ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
}

inline __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>(count >= kLanes ? 0xffff : (1 << count) - 1);
}

inline __m512 widen_halves(const uint16_t* p, __mmask16 mask) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p));
}

// acc + products of unsigned and signed bytes, four neighbours a lane. Written in assembly because GCC copies
// accumulators of the intrinsic to and fro, and runs out of registers.
inline __m512i dot_bytes(__m512i acc, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(unsigned_bytes), "v"(signed_bytes));
  return acc;
}

// The same with four signed bytes for all lanes.
inline __m512i dot_bytes(__m512i acc, __m512i unsigned_bytes, const char* four_signed) {
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(acc)
      : "v"(unsigned_bytes), "m"(*reinterpret_cast<const int32_t*>(four_signed)));
  return acc;
}

// The larger of each lane of `top`, bits of magnitudes, and of v: floats are ordered as their bits, NaN last.
inline __m512i larger_size(__m512i top, Vec v) {
  return _mm512_max_epi32(top, _mm512_and_si512((__m512i)v, _mm512_set1_epi32(0x7fffffff)));
}

// The unit of floats of which the largest, among the lanes of `top`, takes `steps`. NaN if any of them is not
// finite, so that what is multiplied by it is NaN, too.
inline float unit_of(__m512i top, float steps, float& inverse_unit) {
  const float largest = bits_as<float>(_mm512_reduce_max_epi32(top));
  inverse_unit = largest > kSmallestTop ? steps / largest : 0.0f;
  return largest * (1.0f / steps) + 0.0f * largest;
}

inline float unit_of(const float* x, int64_t count, float steps, float& inverse_unit) {
  __m512i top = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += kLanes) top = larger_size(top, load(x + i));
  return unit_of(top, steps, inverse_unit);
}

// Writes high and low bytes of `count` x / unit, then zeros up to place `end`. Returns the integers' sum.
inline int32_t split_bytes(const float* x, int64_t count, int64_t end, float inverse_unit, int8_t* high,
                           int8_t* low) {
  __m512i sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < end; i += kLanes) {
    const Vec v = (Vec)_mm512_maskz_loadu_ps(first_lanes(count - i), x + i);
    const __m512i q = _mm512_cvtps_epi32((__m512)(v * inverse_unit));
    const __m512i top = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(top));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i), _mm512_cvtepi32_epi8(q));
    sum = _mm512_add_epi32(sum, q);
  }
  return _mm512_reduce_add_epi32(sum);
}

// `x` is padded with zeros up to whole vectors.
template <bool kNibbles>
void prepare_integer_query(const float* x, int64_t dim, char* prepared) {
  const int64_t first = kNibbles ? (dim + 1) / 2 : dim;  // channels that begin a run
  float inverse_unit;
  IntegerQuery query = {unit_of(x, dim, kQuerySteps, inverse_unit), 0};
  int8_t* high = reinterpret_cast<int8_t*>(prepared);
  int8_t* low = high + kTermBytes;
  const int32_t sum = split_bytes(x, first, first, inverse_unit, high, low);
  if constexpr (kNibbles) {
    split_bytes(x + first, dim - first, first, inverse_unit, high + kUpperBytes, low + kUpperBytes);
  } else {
    query.sum = sum;
  }
  std::memcpy(prepared + 2 * kTermBytes, &query, sizeof query);
}

inline IntegerQuery integer_query(const char* prepared) {
  IntegerQuery query;
  std::memcpy(&query, prepared + 2 * kTermBytes, sizeof query);
  return query;
}

inline __m512i low_nibbles(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline __m512i high_nibbles(__m512i v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }

// Keeps the compiler from deriving more addresses from one another's than there are registers.
template <class T>
inline T* opaque(T* p) {
  asm("" : "+r"(p));
  return p;
}

// 16 bytes of four tokens, each a quarter of the vector.
inline __m512i four_tokens(const uint8_t* p, int64_t stride) {
  const auto bytes = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * stride)); };
  __m512i v = _mm512_castsi128_si512(bytes(0));
  v = _mm512_inserti32x4(v, bytes(1), 1);
  v = _mm512_inserti32x4(v, bytes(2), 2);
  return _mm512_inserti32x4(v, bytes(3), 3);
}

// Integer dot products of R queries with the bytes, or nibbles, of `tokens` tokens, to `scores`.
//
// 16 tokens at once, one a lane: 4 channels of each are brought into one vector, so that nothing has to be
// summed over lanes. Up to 15 bytes past the last token are read: they are the record's own, and the queries
// are 0 there.
template <int R, bool kNibbles>
void score_codes(const char* queries, const uint8_t* codes, int64_t code_bytes, int tokens, int32_t* scores,
                 int64_t prefetch_bytes) {
  constexpr int kChains = R >= 3 ? 1 : 4 / R;  // so many sums side by side that none waits for another
  constexpr int kColumn = 16;
  uint8_t last[kLanes * kMaxIntegerDim + kColumn];
  for (int t = 0; t < tokens; t += kLanes) {
    const uint8_t* group = codes + t * code_bytes;
    prefetch_lines(moved(group, prefetch_bytes), kLanes * code_bytes);
    if (t + kLanes > tokens) {
      std::memcpy(last, group, static_cast<std::size_t>((tokens - t) * code_bytes));
      group = last;  // what follows there is arbitrary, as are the scores of no tokens
    }
    __m512i high[R * kChains], low[R * kChains];
    PAGED_UNROLLED(i, R * kChains) high[i] = low[i] = _mm512_setzero_si512();
    for (int64_t c = 0; c < code_bytes; c += kColumn) {
      __m512i v[4];
      const uint8_t* token = group + c;
      PAGED_UNROLLED(i, 4) {
        token = opaque(token);
        v[i] = four_tokens(token, 4 * code_bytes);
        token += code_bytes;
      }
      const __m512i v01 = _mm512_unpacklo_epi32(v[0], v[1]), w01 = _mm512_unpackhi_epi32(v[0], v[1]);
      const __m512i v23 = _mm512_unpacklo_epi32(v[2], v[3]), w23 = _mm512_unpackhi_epi32(v[2], v[3]);
      v[0] = _mm512_unpacklo_epi64(v01, v23);
      v[1] = _mm512_unpackhi_epi64(v01, v23);
      v[2] = _mm512_unpacklo_epi64(w01, w23);
      v[3] = _mm512_unpackhi_epi64(w01, w23);
      const char* query = opaque(queries + c);
      PAGED_UNROLLED(g, 4) {
        // Flipping the top bit of int8 adds 128, which the query's sum takes away again.
        const __m512i k = kNibbles ? low_nibbles(v[g]) : _mm512_xor_si512(v[g], _mm512_set1_epi8(-128));
        PAGED_UNROLLED(r, R) {
          const int i = r * kChains + g % kChains;
          high[i] = dot_bytes(high[i], k, query + r * kQueryBytes + 4 * g);
          low[i] = dot_bytes(low[i], k, query + r * kQueryBytes + kTermBytes + 4 * g);
        }
        if constexpr (kNibbles) {
          const __m512i upper = high_nibbles(v[g]);
          PAGED_UNROLLED(r, R) {
            const int i = r * kChains + g % kChains;
            high[i] = dot_bytes(high[i], upper, query + r * kQueryBytes + kUpperBytes + 4 * g);
            low[i] = dot_bytes(low[i], upper, query + r * kQueryBytes + kTermBytes + kUpperBytes + 4 * g);
          }
        }
      }
    }
    PAGED_UNROLLED(r, R) {
      const int own = r * kChains;
      PAGED_UNROLLED(i, kChains - 1) {
        high[own] = _mm512_add_epi32(high[own], high[own + i + 1]);
        low[own] = _mm512_add_epi32(low[own], low[own + i + 1]);
      }
      _mm512_storeu_si512(scores + r * kScoreStride + t,
                          _mm512_add_epi32(_mm512_slli_epi32(high[own], 8), low[own]));
    }
  }
}

#endif

}  // namespace paged
