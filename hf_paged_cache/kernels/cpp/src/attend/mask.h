// Attention masks: boolean (true = attend) or floating (added to the score).
#pragma once

#include "../base/elements.h"

namespace paged {

// Elements of a boolean mask, read as those of a floating one.
struct Bool {
  using Type = uint8_t;
  static float to_float(Type e) { return e != 0 ? 0.0f : -kInfinity; }
};

// What a mask leaves of a run of tokens.
enum class Visible { kNone, kSome, kAll };

// Calls f(token, its element) for a run of tokens. The stride of most masks is 1, and as a constant it makes
// the loop vector code.
template <class Type, class F>
void for_each_token(const Type* mask, int64_t stride, int tokens, F f) {
  if (stride == 1) {
    for (int t = 0; t < tokens; ++t) f(t, mask[t]);
  } else {
    for (int t = 0; t < tokens; ++t) f(t, mask[t * stride]);
  }
}

// Calls f with the mask's element type.
template <class F>
auto with_mask_type(const Call& call, F f) {
  return call.mask_type == kBool ? f(Bool()) : with_element_type(call.mask_type, f);
}

// The mask of one query from token `first` on; tokens are counted from the start of the mask.
template <class Type>
const Type* mask_at(const Call& call, int64_t b, int64_t head, int64_t query, int64_t first) {
  return reinterpret_cast<const Type*>(call.mask) + b * call.mask_batch_stride +
         head * call.mask_head_stride + query * call.mask_query_stride + first * call.mask_token_stride;
}

// What row `b` of the batch, all its heads and queries together, sees of tokens [first, first + tokens).
inline Visible visible_to_row(const Call& call, int64_t b, int64_t first, int tokens) {
  if (call.mask == nullptr) return Visible::kAll;
  const int64_t heads = call.mask_head_stride == 0 ? 1 : call.q_heads;
  const int64_t queries = call.mask_query_stride == 0 ? 1 : call.q_tokens;
  return with_mask_type(call, [&](auto element) {
    using Mask = decltype(element);
    int64_t all_hidden = 0, all_unchanged = 0;
    for (int64_t i = 0; i < heads * queries; ++i) {
      const auto* mask = mask_at<typename Mask::Type>(call, b, i / queries, i % queries, first);
      int hidden = 0, unchanged = 0;
      for_each_token(mask, call.mask_token_stride, tokens, [&](int, auto e) {
        hidden += Mask::to_float(e) == -kInfinity;
        unchanged += Mask::to_float(e) == 0.0f;
      });
      all_hidden += hidden;
      all_unchanged += unchanged;
    }
    const int64_t total = heads * queries * tokens;
    if (all_hidden == total) return Visible::kNone;
    return all_unchanged == total ? Visible::kAll : Visible::kSome;
  });
}

// Adds the mask of one query to the scores of tokens [first, first + tokens). A hidden token's score may be
// NaN (its key is anything), so it is replaced, not added to. Returns whether any token is hidden.
inline bool mask_query(const Call& call, int64_t b, int64_t head, int64_t query, int64_t first, int tokens,
                       float* scores) {
  return with_mask_type(call, [&](auto element) {
    using Mask = decltype(element);
    const auto* mask = mask_at<typename Mask::Type>(call, b, head, query, first);
    int hidden = 0;
    for_each_token(mask, call.mask_token_stride, tokens, [&](int t, auto e) {
      const float bias = Mask::to_float(e);
      scores[t] = bias == -kInfinity ? bias : scores[t] + bias;
      hidden += bias == -kInfinity;
    });
    return hidden != 0;
  });
}

}  // namespace paged
