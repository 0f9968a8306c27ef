// Weighted sums of values on the bytes of records (AVX-512 VNNI).
//
// The instruction adds four neighbouring bytes, so the bytes of four tokens are brought next to each other
// first, once for all queries:
//
//   tokens  a0 a1 a2 …            a0 b0 c0 d0  a1 b1 c1 d1 …     times the weights  wa wb wc wd
//           b0 b1 b2 …    ->
//           c0 c1 c2 …
//           d0 d1 d2 …
//
// Weights take the scales of the tokens in, and become 16-bit integers relative to the largest of the tile,
// as two bytes like queries in dots.h. Sums of up to 256 tokens are exact in 32 bits.
#pragma once

#include <algorithm>

#include "dots.h"

namespace paged {

constexpr int kQuad = 4;  // tokens whose bytes are neighbours

inline int64_t spread_bytes(int64_t block_size, int64_t dim) {
  return round_up(block_size, kQuad) * round_up(dim, kVecBytes);
}

#if defined(PAGED_HAS_DOTS)

constexpr float kWeightSteps = 65535.0f;

inline void spread_quad(__m512i a, __m512i b, __m512i c, __m512i d, uint8_t* out) {
  const __m512i ab_low = _mm512_unpacklo_epi8(a, b), ab_high = _mm512_unpackhi_epi8(a, b);
  const __m512i cd_low = _mm512_unpacklo_epi8(c, d), cd_high = _mm512_unpackhi_epi8(c, d);
  _mm512_store_si512(out, _mm512_unpacklo_epi16(ab_low, cd_low));
  _mm512_store_si512(out + kVecBytes, _mm512_unpackhi_epi16(ab_low, cd_low));
  _mm512_store_si512(out + 2 * kVecBytes, _mm512_unpacklo_epi16(ab_high, cd_high));
  _mm512_store_si512(out + 3 * kVecBytes, _mm512_unpackhi_epi16(ab_high, cd_high));
}

// Bytes of codes, or their nibbles as bytes up to 15. Layout of `out`: chunks of 64 channels; in a chunk the
// quads, each four vectors.
template <bool kNibbles>
void spread(const uint8_t* codes, int64_t dim, int tokens, uint8_t* out, int64_t prefetch_bytes) {
  const int64_t chunk_bytes = round_up(tokens, kQuad) * kVecBytes;
  const int64_t code_bytes = kNibbles ? (dim + 1) / 2 : dim;
  for (int t = 0; t < tokens; t += kQuad) {
    const uint8_t* four[kQuad];  // past the last token, the last one again (its weight is 0)
    for (int i = 0; i < kQuad; ++i) four[i] = codes + code_bytes * std::min(t + i, tokens - 1);
    prefetch_lines(moved(four[0], prefetch_bytes), kQuad * code_bytes);
    uint8_t* to = out + t * kVecBytes;
    for (int64_t c = 0; c < dim; c += kVecBytes, to += chunk_bytes) {
      const __mmask64 mask = first_bytes(dim - c);
      __m512i v[kQuad];
      if (!kNibbles) {
        PAGED_UNROLLED(i, kQuad) v[i] = _mm512_maskz_loadu_epi8(mask, four[i] + c);
      } else if (c + kVecBytes <= code_bytes) {
        PAGED_UNROLLED(i, kQuad) v[i] = low_nibbles(_mm512_loadu_si512(four[i] + c));
      } else if (c >= code_bytes) {
        PAGED_UNROLLED(i, kQuad) v[i] = high_nibbles(_mm512_maskz_loadu_epi8(mask, four[i] + c - code_bytes));
      } else if (code_bytes == kVecBytes / 2) {
        // The same 32 bytes twice, those in the upper half moved by four bits.
        const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
        PAGED_UNROLLED(i, kQuad) {
          const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(four[i]));
          v[i] = low_nibbles(_mm512_srlv_epi16(_mm512_broadcast_i64x4(bytes), shifts));
        }
      } else {  // low bits of the last bytes, then high bits of the first ones
        const __mmask64 low = first_bytes(code_bytes - c), high = mask & ~low;
        PAGED_UNROLLED(i, kQuad) {
          v[i] = low_nibbles(_mm512_maskz_loadu_epi8(low, four[i] + c)) |
                 high_nibbles(_mm512_maskz_loadu_epi8(high, four[i] + c - code_bytes));
        }
      }
      spread_quad(v[0], v[1], v[2], v[3], to);
    }
  }
}

// The weights of R queries as bytes, with what the sums are multiplied with and what is added to them.
template <int R>
struct ByteWeights {
  alignas(64) uint8_t high[R][kMaxBlockSize];
  alignas(64) uint8_t low[R][kMaxBlockSize];
  float unit[R];
  float zero[R];

  // From `weights`, of which a 0 hides its token, whatever the token's scale is. `zeros` may be null. Scales
  // and zeros are halves, one a token.
  ByteWeights(const float* weights, const uint16_t* scales, const uint16_t* zeros, int tokens) {
    alignas(64) float scaled[R][kMaxBlockSize];
    Vec sums[R] = {};
    __m512i tops[R];
    PAGED_UNROLLED(r, R) tops[r] = _mm512_setzero_si512();
    for (int t = 0; t < tokens; t += kLanes) {
      const __mmask16 there = first_lanes(tokens - t);
      const __m512 scale = widen_halves(scales + t, there);
      const __m512 shift = zeros == nullptr ? _mm512_setzero_ps() : widen_halves(zeros + t, there);
      PAGED_UNROLLED(r, R) {
        const __m512 weight = (__m512)load(weights + r * kScoreStride + t);
        const __mmask16 visible = _mm512_mask_cmp_ps_mask(there, weight, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        const Vec product = (Vec)_mm512_maskz_mul_ps(visible, weight, scale);
        store(scaled[r] + t, product);
        tops[r] = larger_size(tops[r], product);
        sums[r] = sums[r] + (Vec)_mm512_maskz_mul_ps(visible, weight, shift);
      }
    }
    PAGED_UNROLLED(r, R) {
      float inverse_unit;
      zero[r] = zeros == nullptr ? 0.0f : sum_of(sums[r]);
      unit[r] = unit_of(tops[r], kWeightSteps, inverse_unit);
      for (int t = 0; t < tokens; t += kLanes) {
        const __m512i q = _mm512_cvtps_epi32((__m512)(load(scaled[r] + t) * inverse_unit));
        _mm_store_si128(reinterpret_cast<__m128i*>(high[r] + t),
                        _mm512_cvtepi32_epi8(_mm512_srli_epi32(q, 8)));
        _mm_store_si128(reinterpret_cast<__m128i*>(low[r] + t), _mm512_cvtepi32_epi8(q));
      }
    }
  }
};

// Adds the weighted values, spread before, to the sums of R queries, in memory order.
template <int R>
void add_spread(const ByteWeights<R>& weights, const uint8_t* spread, int64_t dim, int tokens,
                Vectors<float> sums) {
  const int quads = (tokens + kQuad - 1) / kQuad;
  for (int64_t first = 0; first < dim; first += kVecBytes) {
    __m512i acc[R * 4];
    PAGED_UNROLLED(i, R * 4) acc[i] = _mm512_setzero_si512();
    for (int term = 0; term < 2; ++term) {
      PAGED_UNROLLED(i, R * 4) acc[i] = _mm512_slli_epi32(acc[i], 8);
      const auto& bytes = term == 0 ? weights.high : weights.low;
      const uint8_t* at = spread + first * quads * kQuad;
      for (int quad = 0; quad < quads; ++quad, at += 4 * kVecBytes) {
        __m512i v[4];
        PAGED_UNROLLED(i, 4) v[i] = _mm512_load_si512(at + i * kVecBytes);
        PAGED_UNROLLED(r, R) {
          int32_t four;
          std::memcpy(&four, bytes[r] + quad * kQuad, sizeof four);
          const __m512i weight = _mm512_set1_epi32(four);
          PAGED_UNROLLED(i, 4) acc[r * 4 + i] = dot_bytes(acc[r * 4 + i], weight, v[i]);
        }
      }
    }
    PAGED_UNROLLED(r, R) {
      // Vector i has channels 4 i … 4 i + 3 of each run of 16: to memory order.
      const __m512i p = _mm512_shuffle_i32x4(acc[r * 4 + 0], acc[r * 4 + 1], 0x44);
      const __m512i q = _mm512_shuffle_i32x4(acc[r * 4 + 2], acc[r * 4 + 3], 0x44);
      const __m512i s = _mm512_shuffle_i32x4(acc[r * 4 + 0], acc[r * 4 + 1], 0xee);
      const __m512i u = _mm512_shuffle_i32x4(acc[r * 4 + 2], acc[r * 4 + 3], 0xee);
      const __m512i ordered[4] = {_mm512_shuffle_i32x4(p, q, 0x88), _mm512_shuffle_i32x4(p, q, 0xdd),
                                  _mm512_shuffle_i32x4(s, u, 0x88), _mm512_shuffle_i32x4(s, u, 0xdd)};
      for (int i = 0; i < 4 && first + i * kLanes < sums.stride; ++i) {
        float* to = sums[r] + first + i * kLanes;
        store(to, load(to) + ((Vec)_mm512_cvtepi32_ps(ordered[i]) * weights.unit[r] + weights.zero[r]));
      }
    }
  }
}

#endif

}  // namespace paged
