// How numbers become codes and parameters; the inverse of codes.h.
#pragma once

#include <algorithm>
#include <utility>

#include "codes.h"

namespace paged {

// The smallest half that is not below x, for x >= 0.
inline uint16_t scale_up(float x) {
  const uint16_t near = Float16::from_float(x);
  return Float16::to_float(near) < x ? static_cast<uint16_t>(near + 1) : near;
}

// The largest half that is not above x.
constexpr float kLargestHalf = 65504.0f;

inline uint16_t zero_down(float x) {
  const uint16_t near = Float16::from_float(x);
  const float value = Float16::to_float(near);
  if (!(value > x)) return near;
  if (value > 0.0f) return static_cast<uint16_t>(near - 1);
  return value == 0.0f ? 0x8001 : static_cast<uint16_t>(near + 1);
}

inline float inverse(uint16_t scale) {
  const float wide = Float16::to_float(scale);
  return wide > 0.0f ? 1.0f / wide : 0.0f;
}

// The nearest integers, ties to even.
inline IVec round_even(Vec v) {
#if defined(__AVX512F__)
  return (IVec)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
  return (IVec)_mm256_cvtps_epi32((__m256)v);
#else
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23
  return __builtin_convertvector((v + magic) - magic, IVec);
#endif
}

inline IVec clamped(IVec v, int low, int high) {
  v = v < low ? v - v + low : v;
  return v > high ? v - v + high : v;
}

inline Vec minimum(Vec a, Vec b) { return a < b ? a : b; }

inline float min_of(Vec v) { return -max_of(-v); }

// The low bytes of the lanes.
inline void store_low_bytes(IVec v, uint8_t* out) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
  const __m256i order = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                         0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i bytes = _mm256_shuffle_epi8((__m256i)v, order);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out),
                   _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
#else
  for (int i = 0; i < kLanes; ++i) out[i] = static_cast<uint8_t>(v[i]);
#endif
}

struct Range {
  float low, high;
};

// Halves that cut a range into so many steps.
inline std::pair<uint16_t, uint16_t> scale_and_zero(Range range, float steps) {
  const uint16_t zero = zero_down(range.low);
  return {scale_up((range.high - Float16::to_float(zero)) / steps), zero};
}

inline Range range_of(const float* x, int64_t count) {
  Range range = {x[0], x[0]};
  int64_t i = 0;
  if (count >= kLanes) {
    Vec low = load(x), high = low;
    for (i = kLanes; i + kLanes <= count; i += kLanes) {
      low = minimum(low, load(x + i));
      high = maximum(high, load(x + i));
    }
    range = {min_of(low), max_of(high)};
  }
  for (; i < count; ++i) range = {std::min(range.low, x[i]), std::max(range.high, x[i])};
  return range;
}

// The low bytes of the codes of `count` numbers, (x - zero) / scale clamped.
inline void store_codes(const float* x, int64_t count, float zero, float inverse_scale, int low, int high,
                        uint8_t* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const IVec codes = clamped(round_even((load(x + i) - zero) * inverse_scale), low, high);
    if (count - i >= kLanes) {
      store_low_bytes(codes, out + i);
    } else {
      uint8_t bytes[kLanes];
      store_low_bytes(codes, bytes);
      std::memcpy(out + i, bytes, static_cast<std::size_t>(count - i));
    }
  }
}

inline void pack_nibbles(const uint8_t* codes, int64_t dim, uint8_t* out) {
  const int64_t half = (dim + 1) / 2, pairs = dim / 2;
  for (int64_t i = 0; i < pairs; ++i) out[i] = static_cast<uint8_t>(codes[i] | codes[half + i] << 4);
  if (pairs != half) out[pairs] = codes[pairs];
}

// e4m3 of numbers within its range, ties to even.
inline void store_fp8(const float* x, int64_t count, float inverse_scale, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = std::min(std::max(x[i] * inverse_scale, -448.0f), 448.0f);
    const uint32_t bits = bits_as<uint32_t>(scaled);
    const uint32_t size = bits & 0x7fffffffu;
    const uint32_t normal = (size - (120u << 23) + 0x7ffffu + ((size >> 20) & 1u)) >> 20;
    // Adding 2^14 leaves a subnormal in units of 2^-9 in the low bits, rounded by the adder.
    const uint32_t small = bits_as<uint32_t>(std::fabs(scaled) + 16384.0f);
    out[i] = static_cast<uint8_t>((size < (121u << 23) ? small & 0xffu : normal) | (bits >> 24 & 0x80u));
  }
}

// The scale of a token that has no zero.
inline uint16_t symmetric_scale(const float* x, int64_t dim, float largest_code) {
  const Range range = range_of(x, dim);
  return scale_up(std::max(std::fabs(range.low), std::fabs(range.high)) / largest_code);
}

// One token, rotated where the codec rotates; whole vectors of it may be read. `unpacked` is for `dim` codes.
__attribute__((noinline)) inline void encode_token(const Stored& s, int64_t slot, const float* x,
                                                   uint8_t* unpacked) {
  uint8_t* codes = s.codes_of(slot);
  if (s.codec == kInt8Token) {
    s.params[slot] = symmetric_scale(x, s.dim, 127.0f);
    return store_codes(x, s.dim, 0.0f, inverse(s.params[slot]), -127, 127, codes);
  }
  if (s.codec == kFp8Token) {
    s.params[slot] = symmetric_scale(x, s.dim, 448.0f);
    return store_fp8(x, s.dim, inverse(s.params[slot]), codes);
  }
  for (int64_t g = 0; g < s.groups; ++g) {
    const float* group = x + g * s.group_size;
    Range range = range_of(group, s.group_size);
    if (is_rotated(s.codec)) {  // which can reach beyond what a zero holds
      range = {std::max(range.low, -kLargestHalf), std::min(range.high, kLargestHalf)};
    }
    const auto [scale, zero] = scale_and_zero(range, 15.0f);
    s.params[slot * s.groups + g] = scale;
    s.params[(s.block_size + slot) * s.groups + g] = zero;
    store_codes(group, s.group_size, Float16::to_float(zero), inverse(scale), 0, 15,
                unpacked + g * s.group_size);
  }
  pack_nibbles(unpacked, s.dim, codes);
}

// A whole block of a codec that takes nothing less; tokens of `x` are `stride` floats apart, a multiple of
// kLanes. Not rotated. `params` has room for 2 * stride floats, `unpacked` for `dim` codes.
__attribute__((noinline)) inline void encode_block(const Stored& s, float* x, int64_t stride,
                                                   float* params, uint8_t* unpacked) {
  if (s.codec == kInt8Block) {
    Range all = range_of(x, s.dim);
    for (int64_t t = 1; t < s.block_size; ++t) {
      const Range range = range_of(x + t * stride, s.dim);
      all = {std::min(all.low, range.low), std::max(all.high, range.high)};
    }
    const auto [scale, zero] = scale_and_zero(all, 255.0f);
    s.params[0] = scale;
    s.params[1] = zero;
    for (int64_t t = 0; t < s.block_size; ++t) {
      store_codes(x + t * stride, s.dim, Float16::to_float(zero), inverse(scale), 0, 255, s.codes_of(t));
    }
    return;
  }
  float* zeros = params;
  float* inverses = params + stride;
  for (int64_t i = 0; i < stride; i += kLanes) {
    Vec low = load(x + i), high = low;
    for (int64_t t = 1; t < s.block_size; ++t) {
      low = minimum(low, load(x + t * stride + i));
      high = maximum(high, load(x + t * stride + i));
    }
    for (int64_t c = i; c < std::min(i + kLanes, s.dim); ++c) {
      const auto [scale, zero] = scale_and_zero({low[c - i], high[c - i]}, 15.0f);
      zeros[c] = Float16::to_float(zero);
      inverses[c] = inverse(scale);
      s.params[c] = scale;
      s.params[s.dim + c] = zero;
    }
  }
  for (int64_t t = 0; t < s.block_size; ++t) {
    float* token = x + t * stride;
    for (int64_t i = 0; i < s.dim; ++i) token[i] = (token[i] - zeros[i]) * inverses[i];
    store_codes(token, s.dim, 0.0f, 1.0f, 0, 15, unpacked);
    pack_nibbles(unpacked, s.dim, s.codes_of(t));
  }
}

}  // namespace paged
