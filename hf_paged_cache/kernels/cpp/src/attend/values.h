// Weighted sums of the values of one tile.
#pragma once

#include <type_traits>

#include "scores.h"

namespace paged {

// Pairs of columns whose sums are kept in registers at once, for so many queries.
constexpr int columns_together(int queries) {
  return kLanes == 16 ? (queries == 4 ? 2 : 4) : (queries == 1 ? 4 : queries == 4 ? 1 : 2);
}

// sums[r][column] += sum over t of weights[r * kScoreStride + t] * values[t][column], for C pairs of columns.
// With kPartial the only pair has `count` elements.
template <class Element, int R, int C, bool kPartial>
void add_columns(const float* weights, Vectors<const typename Element::Type> values, int tokens, int count,
                 Vectors<float> sums, int64_t prefetch_bytes) {
  constexpr int kPieceBytes = kPair * sizeof(typename Element::Type);
  Vec acc[R][2 * C];
  PAGED_UNROLLED(r, R) {
    PAGED_UNROLLED(c, 2 * C) acc[r][c] = load(sums[r] + c * kLanes);
  }
  for (int t = 0; t < tokens; ++t) {
    const typename Element::Type* value = values[t];
    PAGED_UNROLLED(c, C) {
      const Pair v = kPartial ? Element::load_first(value, count) : Element::load(value + c * kPair);
      prefetch_piece(moved(value + c * kPair, prefetch_bytes), kPieceBytes, c);
      PAGED_UNROLLED(r, R) {
        const float weight = weights[r * kScoreStride + t];
        acc[r][2 * c] = acc[r][2 * c] + weight * v.a;
        acc[r][2 * c + 1] = acc[r][2 * c + 1] + weight * v.b;
      }
    }
  }
  PAGED_UNROLLED(r, R) {
    PAGED_UNROLLED(c, 2 * C) store(sums[r] + c * kLanes, acc[r][c]);
  }
}

// Adds weighted values to the sums of R queries, which are in lane order, `dim` rounded up to pairs.
template <class Element, int R>
void add_values(const float* weights, Vectors<const typename Element::Type> values, int tokens, int dim,
                Vectors<float> sums, int64_t prefetch_bytes) {
  constexpr int C = columns_together(R);
  const int pairs = dim / kPair;
  const auto from = [](auto vectors, int c) {
    vectors.first += c * kPair;
    return vectors;
  };
  int c = 0;
  const auto add = [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    for (; c + kColumns <= pairs; c += kColumns) {
      add_columns<Element, R, kColumns, false>(weights, from(values, c), tokens, 0, from(sums, c),
                                               prefetch_bytes);
    }
  };
  add(std::integral_constant<int, C>());
  if constexpr (C > 2) add(std::integral_constant<int, 2>());
  if constexpr (C > 1) add(std::integral_constant<int, 1>());
  if (dim % kPair != 0) {
    add_columns<Element, R, 1, true>(weights, from(values, c), tokens, dim % kPair, from(sums, c),
                                     prefetch_bytes);
  }
}

}  // namespace paged
