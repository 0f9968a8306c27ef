// Elements of K, V, queries and outputs, one struct for each type, read and written as pairs of vectors.
//
// A pair holds kPair consecutive elements in the type's *lane order*, which is free to differ from memory
// order: sums over head_dim do not care, and `store` puts outputs back. bfloat16 keeps even elements in the
// first vector and odd ones in the second, which costs one shift and one mask for 2 * kLanes elements.
// `lanes_of` puts floats in memory order into it.
#pragma once

#include "../abi.h"
#include "simd.h"

namespace paged {

struct Pair {
  Vec a, b;
};

// Vectors of any length in memory, `stride` elements apart.
template <class Type>
struct Vectors {
  Type* first;
  int64_t stride;

  Type* operator[](int64_t i) const { return first + i * stride; }
};

// The first `count` elements at `p`, and zeros; nothing past them is read.
template <class Element>
Pair load_padded(const typename Element::Type* p, int count) {
  typename Element::Type padded[kPair] = {};
  std::memcpy(padded, p, static_cast<std::size_t>(count) * sizeof(padded[0]));
  return Element::load(padded);
}

// The first `left` elements at `p` and zeros, or a whole pair if there are as many.
template <class Element>
Pair load_up_to(const typename Element::Type* p, int64_t left) {
  return left >= kPair ? Element::load(p) : Element::load_first(p, static_cast<int>(left));
}

// The first `left` elements of a pair, or all of it if there is room.
template <class Element>
void store_up_to(typename Element::Type* p, Pair v, int64_t left) {
  if (left >= kPair) return Element::store(p, v);
  typename Element::Type padded[kPair];
  Element::store(padded, v);
  std::memcpy(p, padded, static_cast<std::size_t>(left) * sizeof(padded[0]));
}

struct Float32 {
  using Type = float;

  static Pair load(const Type* p) { return {paged::load(p), paged::load(p + kLanes)}; }

  static Pair load_first(const Type* p, int count) {
#if defined(__AVX512F__)
    const unsigned mask = (1u << count) - 1u;
    return {(Vec)_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p),
            (Vec)_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> kLanes), p + kLanes)};
#else
    return load_padded<Float32>(p, count);
#endif
  }

  static Pair lanes_of(const float* p) { return load(p); }

  static void store(Type* p, Pair v) {
    paged::store(p, v.a);
    paged::store(p + kLanes, v.b);
  }

  static float to_float(Type x) { return x; }
};

struct BFloat16 {
  using Type = uint16_t;

  static Pair split(UVec two) { return {(Vec)(two << 16), (Vec)(two & 0xffff0000u)}; }

  static Pair load(const Type* p) {
    UVec two;
    std::memcpy(&two, p, sizeof two);
    return split(two);
  }

  static Pair load_first(const Type* p, int count) {
#if defined(__AVX512BW__)
    return split((UVec)_mm512_maskz_loadu_epi16((1u << count) - 1u, p));
#else
    return load_padded<BFloat16>(p, count);
#endif
  }

  static Pair lanes_of(const float* p) {
    Pair v;
    for (int i = 0; i < kLanes; ++i) {
      v.a[i] = p[2 * i];
      v.b[i] = p[2 * i + 1];
    }
    return v;
  }

  static void store(Type* p, Pair v) {
    const UVec two = (rounded(v.a) >> 16) | (rounded(v.b) & 0xffff0000u);
    std::memcpy(p, &two, sizeof two);
  }

  // The high half of each lane is the nearest bfloat16, ties to even; NaN stays NaN.
  static UVec rounded(Vec v) {
    const UVec bits = (UVec)v;
    return v != v ? (bits | 0x400000u) : bits + 0x7fffu + ((bits >> 16) & 1u);
  }

  static float to_float(Type x) { return bits_as<float>(static_cast<uint32_t>(x) << 16); }
};

struct Float16 {
  using Type = uint16_t;

#if defined(__AVX512F__)
  static Vec widen(const Type* p) {
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void narrow(Type* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__F16C__)
  static Vec widen(const Type* p) {
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void narrow(Type* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
  }
#else
  static Vec widen(const Type* p) {
    Vec v;
    for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
    return v;
  }
  static void narrow(Type* p, Vec v) {
    for (int i = 0; i < kLanes; ++i) p[i] = from_float(v[i]);
  }
#endif

  static Pair load(const Type* p) { return {widen(p), widen(p + kLanes)}; }
  static Pair load_first(const Type* p, int count) { return load_padded<Float16>(p, count); }
  static Pair lanes_of(const float* p) { return {paged::load(p), paged::load(p + kLanes)}; }
  static void store(Type* p, Pair v) {
    narrow(p, v.a);
    narrow(p + kLanes, v.b);
  }

  static float to_float(Type x) {
    const uint32_t size = x & 0x7fffu;
    // Shifted into place the exponent is 112 too small; multiplying corrects it, subnormal halves included.
    uint32_t bits = bits_as<uint32_t>(bits_as<float>(size << 13) * 0x1p112f);
    if (size >= 0x7c00u) bits |= 0x7f800000u;  // infinity and NaN
    return bits_as<float>(bits | static_cast<uint32_t>(x & 0x8000u) << 16);
  }

  // The nearest half, ties to even.
  static Type from_float(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return static_cast<Type>(sign | 0x7e00u);   // NaN
    if (size >= 0x477ff000u) return static_cast<Type>(sign | 0x7c00u);  // rounds past 65504
    if (size >= 0x38800000u) {
      return static_cast<Type>(sign | ((size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13));
    }
    // Subnormal half: adding 0.5 leaves the value in units of 2^-24 in the low bits, rounded by the adder.
    return static_cast<Type>(sign | (bits_as<uint32_t>(bits_as<float>(size) + 0.5f) - 0x3f000000u));
  }
};

// Calls f with the struct of an element type.
template <class F>
auto with_element_type(int64_t type, F f) {
  if (type == kBFloat16) return f(BFloat16());
  if (type == kFloat16) return f(Float16());
  return f(Float32());
}

}  // namespace paged
