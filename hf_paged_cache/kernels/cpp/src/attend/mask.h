// Attention masks: boolean (true = attend) or floating (added to the score).
#pragma once

#include "../abi.h"
#include "../base/elements.h"

namespace paged {

struct BoolMask {
  using Type = uint8_t;
  static float bias(Type e) { return e != 0 ? 0.0f : -kInfinity; }
};

template <class Element>
struct FloatMask {
  using Type = typename Element::Type;
  static float bias(Type e) { return Element::to_float(e); }
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
auto with_mask_type(int64_t type, F f) {
  if (type == kFloat32Mask) return f(FloatMask<Float32>());
  if (type == kBFloat16Mask) return f(FloatMask<BFloat16>());
  if (type == kFloat16Mask) return f(FloatMask<Float16>());
  return f(BoolMask());
}

// What row `b` of the batch, all its heads and queries together, sees of tokens [first, first + tokens),
// which are counted from the start of the mask.
inline Visible visible_to_row(const Call& call, int64_t b, int64_t first, int tokens) {
  if (call.mask_type == kNoMask) return Visible::kAll;
  const int64_t heads = call.mask_head_stride == 0 ? 1 : call.q_heads;
  const int64_t queries = call.mask_query_stride == 0 ? 1 : call.q_tokens;
  return with_mask_type(call.mask_type, [&](auto type) {
    using Mask = decltype(type);
    const auto* mask = reinterpret_cast<const typename Mask::Type*>(call.mask) + b * call.mask_batch_stride +
                       first * call.mask_token_stride;
    int64_t all_hidden = 0, all_unchanged = 0;
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t q = 0; q < queries; ++q) {
        const auto* of_query = mask + h * call.mask_head_stride + q * call.mask_query_stride;
        int hidden = 0, unchanged = 0;
        for_each_token(of_query, call.mask_token_stride, tokens, [&](int, auto element) {
          const float bias = Mask::bias(element);
          hidden += bias == -kInfinity;
          unchanged += bias == 0.0f;
        });
        all_hidden += hidden;
        all_unchanged += unchanged;
      }
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
  return with_mask_type(call.mask_type, [&](auto type) {
    using Mask = decltype(type);
    const auto* mask = reinterpret_cast<const typename Mask::Type*>(call.mask) + b * call.mask_batch_stride +
                       head * call.mask_head_stride + query * call.mask_query_stride +
                       first * call.mask_token_stride;
    int hidden = 0;
    for_each_token(mask, call.mask_token_stride, tokens, [&](int t, auto element) {
      const float bias = Mask::bias(element);
      scores[t] = bias == -kInfinity ? bias : scores[t] + bias;
      hidden += bias == -kInfinity;
    });
    return hidden != 0;
  });
}

}  // namespace paged
