// Dot products of a few queries with the keys of one tile.
#pragma once

#include "../abi.h"
#include "../base/elements.h"
#include "../base/prefetch.h"

namespace paged {

// How one pair of key elements is multiplied with one pair of query elements.
template <class Element>
struct PairDot {
  using Type = typename Element::Type;
  using Keys = Pair;
  static constexpr int kQueryFloats = kPair;  // prepared query: floats for each pair

  static Keys load_keys(const Type* p) { return Element::load(p); }
  static Keys load_first_keys(const Type* p, int count) { return Element::load_first(p, count); }
  static Pair load_query(const float* q) { return {load(q), load(q + kLanes)}; }
  static void store_query(float* q, Keys keys) {
    store(q, keys.a);
    store(q + kLanes, keys.b);
  }
  static void accumulate(Vec& acc, Pair q, Keys k) { acc = acc + q.a * k.a + q.b * k.b; }
};

#if defined(__AVX512BF16__)
// vdpbf16ps multiplies pairs of bfloat16 exactly and adds in float: the query stays as it came.
template <>
struct PairDot<BFloat16> {
  using Type = BFloat16::Type;
  using Keys = __m512i;
  static constexpr int kQueryFloats = kLanes;

  static Keys load_keys(const Type* p) { return _mm512_loadu_si512(p); }
  static Keys load_first_keys(const Type* p, int count) {
    return _mm512_maskz_loadu_epi16((1u << count) - 1u, p);
  }
  static Keys load_query(const float* q) { return _mm512_loadu_si512(q); }
  static void store_query(float* q, Keys keys) { _mm512_storeu_si512(q, keys); }
  static void accumulate(Vec& acc, Keys q, Keys k) {
    acc = (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)q, (__m512bh)k);
  }
};
#endif

// Floats that a prepared query of `dim` elements takes.
template <class Element>
constexpr int64_t prepared_query_floats(int64_t dim) {
  return round_up(dim, kPair) / kPair * PairDot<Element>::kQueryFloats;
}

// Writes one query in the lane order of its keys, padded with zeros.
template <class Element>
void prepare_query(const typename Element::Type* query, int dim, float* prepared) {
  using Dot = PairDot<Element>;
  for (int c = 0; c < dim; c += kPair, prepared += Dot::kQueryFloats) {
    const auto* from = query + c;
    Dot::store_query(prepared, c + kPair <= dim ? Dot::load_keys(from) : Dot::load_first_keys(from, dim - c));
  }
}

// Tokens whose dot products are taken together: as many accumulators as fit beside the operands in registers.
constexpr int tokens_together(int queries) { return queries == 3 ? 4 : (kLanes == 16 ? 16 : 8) / queries; }

constexpr int kScoreSlack = 16;  // floats past the last token that `score_tile` may overwrite
constexpr int kScoreStride = kMaxBlockSize + kScoreSlack;  // floats between the scores of two queries

// scores[r * kScoreStride + t] = query r · key t, for R queries and `tokens` keys (unscaled). Lines at
// `prefetch_bytes` from the keys read are prefetched.
template <class Element, int R>
void score_tile(Vectors<const float> queries, Vectors<const typename Element::Type> keys, int tokens, int dim,
                float* scores, int64_t prefetch_bytes) {
  using Dot = PairDot<Element>;
  constexpr int T = tokens_together(R);
  constexpr int kPieceBytes = kPair * sizeof(typename Element::Type);
  const int pairs = dim / kPair;
  const int rest = dim % kPair;
  for (int t = 0; t < tokens; t += T) {
    const typename Element::Type* key[T];
    // Past the last token the last key is read again: its scores land in the slack.
    for (int j = 0; j < T; ++j) key[j] = keys[t + j < tokens ? t + j : tokens - 1];
    Vec acc[R * T];
    PAGED_UNROLLED(i, R * T) acc[i] = Vec{};
    // Written out twice: a lambda that captures the accumulators keeps them in memory.
    for (int c = 0; c < pairs; ++c) {
      decltype(Dot::load_query(queries.first)) query[R];
      PAGED_UNROLLED(r, R) query[r] = Dot::load_query(queries[r] + c * Dot::kQueryFloats);
      PAGED_UNROLLED(j, T) {
        const auto k = Dot::load_keys(key[j] + c * kPair);
        prefetch_piece(moved(key[j] + c * kPair, prefetch_bytes), kPieceBytes, c);
        PAGED_UNROLLED(r, R) Dot::accumulate(acc[r * T + j], query[r], k);
      }
    }
    if (rest != 0) {
      PAGED_UNROLLED(j, T) {
        const auto k = Dot::load_first_keys(key[j] + pairs * kPair, rest);
        prefetch_piece(moved(key[j] + pairs * kPair, prefetch_bytes), kPieceBytes, pairs);
        PAGED_UNROLLED(r, R) {
          Dot::accumulate(acc[r * T + j], Dot::load_query(queries[r] + pairs * Dot::kQueryFloats), k);
        }
      }
    }
    float sums[R * T + kScoreSlack];
    store_sums<R * T>(acc, sums);
    for (int r = 0; r < R; ++r) std::memcpy(scores + r * kScoreStride + t, sums + r * T, T * sizeof(float));
  }
}

}  // namespace paged
