// Attention masks: boolean (true = attend) or floating (added to the score).
#pragma once

#include "abi.h"
#include "rows.h"

namespace paged {

struct BoolMask {
  using Element = std::uint8_t;
  static float bias(Element e) { return e != 0 ? 0.0f : -kInfinity; }
};

template <class Row>
struct FloatMask {
  using Element = typename Row::Element;
  static float bias(Element e) { return Row::to_float(e); }
};

// What a mask leaves of a run of tokens.
enum class Seen { kNone, kSome, kAll };

struct SeenCount {
  std::int64_t total = 0, hidden = 0, unchanged = 0;

  Seen verdict() const {
    if (hidden == total) return Seen::kNone;
    return unchanged == total ? Seen::kAll : Seen::kSome;
  }
};

template <class Mask>
void count_seen(const typename Mask::Element* mask, std::int64_t stride, int tokens, SeenCount& count) {
  int hidden = 0, unchanged = 0;
  const auto look = [&](int t, std::int64_t by) {
    const float bias = Mask::bias(mask[t * by]);
    hidden += bias == -kInfinity;
    unchanged += bias == 0.0f;
  };
  if (stride == 1) {  // said as a constant, so that the loop becomes vector code
    for (int t = 0; t < tokens; ++t) look(t, 1);
  } else {
    for (int t = 0; t < tokens; ++t) look(t, stride);
  }
  count.total += tokens;
  count.hidden += hidden;
  count.unchanged += unchanged;
}

// Adds the mask to scores. A hidden token's score may be NaN (its key is anything), so it is replaced, not
// added to.
template <class Mask>
bool mask_scores(const typename Mask::Element* mask, std::int64_t stride, int tokens, float* scores) {
  int hidden = 0;
  const auto apply = [&](int t, std::int64_t by) {
    const float bias = Mask::bias(mask[t * by]);
    scores[t] = bias == -kInfinity ? bias : scores[t] + bias;
    hidden += bias == -kInfinity;
  };
  if (stride == 1) {
    for (int t = 0; t < tokens; ++t) apply(t, 1);
  } else {
    for (int t = 0; t < tokens; ++t) apply(t, stride);
  }
  return hidden != 0;
}

// Calls f with the mask's element type.
template <class F>
auto with_mask_type(std::int64_t type, F f) {
  switch (type) {
    case kFloat32Mask:
      return f(FloatMask<Float32>());
    case kBFloat16Mask:
      return f(FloatMask<BFloat16>());
    case kFloat16Mask:
      return f(FloatMask<Float16>());
    default:
      return f(BoolMask());
  }
}

// What row `b` of the batch, all its heads and queries together, sees of tokens [first, first + tokens),
// which are counted from the start of the mask.
inline Seen seen_by_row(const Call& call, std::int64_t b, std::int64_t first, int tokens) {
  if (call.mask_type == kNoMask) return Seen::kAll;
  const std::int64_t heads = call.mask_head_stride == 0 ? 1 : call.q_heads;
  const std::int64_t queries = call.mask_query_stride == 0 ? 1 : call.q_tokens;
  return with_mask_type(call.mask_type, [&](auto mask_type) {
    using Mask = decltype(mask_type);
    const auto* mask = reinterpret_cast<const typename Mask::Element*>(call.mask) +
                       b * call.mask_batch_stride + first * call.mask_token_stride;
    SeenCount count;
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < queries; ++i) {
        count_seen<Mask>(mask + h * call.mask_head_stride + i * call.mask_query_stride,
                         call.mask_token_stride, tokens, count);
      }
    }
    return count.verdict();
  });
}

// Applies the mask of one query to the scores of tokens [first, first + tokens). Returns whether any token is
// hidden.
inline bool mask_query(const Call& call, std::int64_t b, std::int64_t head, std::int64_t query,
                       std::int64_t first, int tokens, float* scores) {
  return with_mask_type(call.mask_type, [&](auto mask_type) {
    using Mask = decltype(mask_type);
    const auto* mask = reinterpret_cast<const typename Mask::Element*>(call.mask) +
                       b * call.mask_batch_stride + head * call.mask_head_stride +
                       query * call.mask_query_stride + first * call.mask_token_stride;
    return mask_scores<Mask>(mask, call.mask_token_stride, tokens, scores);
  });
}

}  // namespace paged
