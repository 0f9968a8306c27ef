// The codecs of formats/: where the codes and parameters of a record are, and how codes become numbers.
#pragma once

#include "../abi.h"
#include "../base/elements.h"

namespace paged {

inline bool is_rotated(int64_t codec) { return codec == kInt8Token || codec == kInt4Token; }
inline bool is_per_token(int64_t codec) { return codec != kInt4Channel && codec != kInt8Block; }
inline bool has_nibbles(int64_t codec) {
  return codec == kInt4Token || codec == kInt4Channel || codec == kInt4Group;
}

// The K, or the V, of one record.
struct Stored {
  int64_t codec, group_size, groups, block_size, dim;
  uint8_t* codes;
  uint16_t* params;

  int64_t code_bytes() const { return has_nibbles(codec) ? (dim + 1) / 2 : dim; }
  uint8_t* codes_of(int64_t slot) const { return codes + slot * code_bytes(); }
};

inline uint8_t* record_at(const Blocks& blocks, int64_t id, int64_t h) {
  return blocks.records.data + id * blocks.records.block_stride + h * blocks.records.head_stride;
}

// Without groups, a token is one.
inline Stored stored_in(const Blocks& blocks, const Side& side, uint8_t* record) {
  const int64_t group_size = side.codec == kInt4Group ? side.group_size : side.dim;
  const int64_t groups = side.codec == kInt4Group ? side.dim / group_size : 1;
  return {side.codec,
          group_size,
          groups,
          blocks.block_size,
          side.dim,
          record + side.codes,
          reinterpret_cast<uint16_t*>(record + side.params)};
}

// Codes of int8, which `score_tile` and `add_values` take as they are.
struct Int8 {
  using Type = uint8_t;
  static constexpr float kUnit = 1.0f;

  static Vec widen(const Type* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    Vec v;
    for (int i = 0; i < kLanes; ++i) v[i] = static_cast<int8_t>(p[i]);
    return v;
#endif
  }

  static Pair load(const Type* p) { return {widen(p), widen(p + kLanes)}; }
  static Pair load_first(const Type* p, int count) { return load_padded<Int8>(p, count); }
};

// Codes of e4m3, read as numbers 256 times too small: float16 with the bits moved by one place. The code of
// NaN, which no encoder makes, reads as a number, so that a weight of 0 is enough to hide it.
struct Fp8 {
  using Type = uint8_t;
  static constexpr float kUnit = 256.0f;

#if defined(__AVX512BW__)
  static Pair of_bytes(__m256i bytes) {
    const __m512i words = _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8);
    const __m512i halves = _mm512_and_si512(_mm512_srai_epi16(words, 1), _mm512_set1_epi16(~0x4000));
    return {(Vec)_mm512_cvtph_ps(_mm512_castsi512_si256(halves)),
            (Vec)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1))};
  }
  static Pair load(const Type* p) {
    return of_bytes(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Pair load_first(const Type* p, int count) {
    return of_bytes(_mm256_maskz_loadu_epi8((1u << count) - 1u, p));
  }
#elif defined(__AVX2__) && defined(__F16C__)
  static Pair load(const Type* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
    const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(~0x4000));
    return {(Vec)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
            (Vec)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  }
  static Pair load_first(const Type* p, int count) { return load_padded<Fp8>(p, count); }
#else
  static Vec widen(const Type* p) {
    UVec code;
    for (int i = 0; i < kLanes; ++i) code[i] = p[i];
    const UVec size = code & 0x7fu;
    const Vec normal = (Vec)((size << 20) + (112u << 23));
    const Vec subnormal = __builtin_convertvector((IVec)size, Vec) * 0x1p-17f;
    return (Vec)((UVec)(size < 8u ? subnormal : normal) | (code & 0x80u) << 24);
  }
  static Pair load(const Type* p) { return {widen(p), widen(p + kLanes)}; }
  static Pair load_first(const Type* p, int count) { return load_padded<Fp8>(p, count); }
#endif
};

// out[i] = scale * code, for `dim` bytes of a token; `out` has room up to whole pairs.
template <class Code>
void widen_bytes(const uint8_t* codes, int64_t dim, float scale, float* out) {
  for (int64_t i = 0; i < dim; i += kPair) {
    const Pair v = load_up_to<Code>(codes + i, dim - i);
    store(out + i, v.a * (scale * Code::kUnit));
    store(out + i + kLanes, v.b * (scale * Code::kUnit));
  }
}

// Nibbles of a token as floats.
inline void widen_nibbles(const uint8_t* codes, int64_t dim, float* out) {
  const int64_t half = (dim + 1) / 2;
  for (int64_t i = 0; i < half; ++i) out[i] = static_cast<float>(codes[i] & 15);
  for (int64_t i = 0; i < dim - half; ++i) out[half + i] = static_cast<float>(codes[i] >> 4);
}

// What `decode_token` needs of a whole block: `dim` scales, then `dim` zeros, of codecs by channel.
inline void widen_block_params(const Stored& s, float* out) {
  if (s.codec != kInt4Channel) return;
  int64_t i = 0;
  for (; i + kLanes <= 2 * s.dim; i += kLanes) store(out + i, Float16::widen(s.params + i));
  for (; i < 2 * s.dim; ++i) out[i] = Float16::to_float(s.params[i]);
}

// One token as it is stored, rotated where the codec rotates. `out` has room for `dim` rounded up to pairs.
inline void decode_token(const Stored& s, int64_t slot, const float* block_params, float* out) {
  const auto param = [&](int64_t i) { return Float16::to_float(s.params[i]); };
  const uint8_t* codes = s.codes_of(slot);
  switch (s.codec) {
    case kInt8Token:
      widen_bytes<Int8>(codes, s.dim, param(slot), out);
      break;
    case kFp8Token:
      widen_bytes<Fp8>(codes, s.dim, param(slot), out);
      break;
    case kInt8Block: {
      const float scale = param(0), zero = param(1);
      for (int64_t i = 0; i < s.dim; ++i) out[i] = static_cast<float>(codes[i]) * scale + zero;
      break;
    }
    case kInt4Channel:
      widen_nibbles(codes, s.dim, out);
      for (int64_t i = 0; i < s.dim; ++i) out[i] = out[i] * block_params[i] + block_params[s.dim + i];
      break;
    default: {
      widen_nibbles(codes, s.dim, out);
      for (int64_t g = 0; g < s.groups; ++g) {
        const float scale = param(slot * s.groups + g), zero = param((s.block_size + slot) * s.groups + g);
        float* group = out + g * s.group_size;
        for (int64_t i = 0; i < s.group_size; ++i) group[i] = group[i] * scale + zero;
      }
    }
  }
}

}  // namespace paged
