// Weighted sums of the values of one tile.
#pragma once

#include <type_traits>

#include "../base/elements.h"
#include "../base/prefetch.h"

namespace paged {

// Pairs of columns whose sums are kept in registers at once, for R rows of weights.
constexpr int columns_together(int rows) {
  return kLanes == 16 ? (rows == 4 ? 2 : 4) : (rows == 1 ? 4 : rows == 4 ? 1 : 2);
}

// acc[r][column] += sum over t of weights[r][t] * values[t][column], for C pairs of columns. With kPartial
// the only pair has `count` elements.
template <class Element, int R, int C, bool kPartial>
void add_columns(const float* weights, int weights_stride, const typename Element::Type* values,
                 int64_t value_stride, int tokens, int count, float* acc, int64_t acc_stride,
                 int64_t prefetch_bytes) {
  constexpr int kPieceBytes = kPair * sizeof(typename Element::Type);
  Vec sums[R][2 * C];
  PAGED_UNROLL
  for (int r = 0; r < R; ++r) {
    PAGED_UNROLL
    for (int c = 0; c < 2 * C; ++c) sums[r][c] = load(acc + r * acc_stride + c * kLanes);
  }
  for (int t = 0; t < tokens; ++t) {
    const typename Element::Type* row = values + t * value_stride;
    PAGED_UNROLL
    for (int c = 0; c < C; ++c) {
      const Pair v = kPartial ? Element::load_first(row, count) : Element::load(row + c * kPair);
      prefetch_piece(moved(row + c * kPair, prefetch_bytes), kPieceBytes, c);
      PAGED_UNROLL
      for (int r = 0; r < R; ++r) {
        const float weight = weights[r * weights_stride + t];
        sums[r][2 * c] = sums[r][2 * c] + weight * v.a;
        sums[r][2 * c + 1] = sums[r][2 * c + 1] + weight * v.b;
      }
    }
  }
  PAGED_UNROLL
  for (int r = 0; r < R; ++r) {
    PAGED_UNROLL
    for (int c = 0; c < 2 * C; ++c) store(acc + r * acc_stride + c * kLanes, sums[r][c]);
  }
}

// Adds the weighted values of `tokens` tokens to R rows of sums, which are in lane order, `dim` rounded up to
// pairs.
template <class Element, int R>
void add_values(const float* weights, int weights_stride, const typename Element::Type* values,
                int64_t value_stride, int tokens, int dim, float* acc, int64_t acc_stride,
                int64_t prefetch_bytes) {
  constexpr int C = columns_together(R);
  const int pairs = dim / kPair;
  int c = 0;
  const auto add = [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    for (; c + kColumns <= pairs; c += kColumns) {
      add_columns<Element, R, kColumns, false>(weights, weights_stride, values + c * kPair, value_stride,
                                               tokens, 0, acc + c * kPair, acc_stride, prefetch_bytes);
    }
  };
  add(std::integral_constant<int, C>());
  if constexpr (C > 2) add(std::integral_constant<int, 2>());
  if constexpr (C > 1) add(std::integral_constant<int, 1>());
  if (dim % kPair != 0) {
    add_columns<Element, R, 1, true>(weights, weights_stride, values + c * kPair, value_stride, tokens,
                                     dim % kPair, acc + c * kPair, acc_stride, prefetch_bytes);
  }
}

// Writes `dim` sums, times `factor`, to a row of the element type.
template <class Element>
void store_values(const float* acc, float factor, int dim, typename Element::Type* out) {
  for (int c = 0; c < dim; c += kPair) {
    store_up_to<Element>(out + c, {load(acc + c) * factor, load(acc + c + kLanes) * factor}, dim - c);
  }
}

}  // namespace paged
