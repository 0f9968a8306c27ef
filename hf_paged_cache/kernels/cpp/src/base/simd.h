// Vectors of floats: the widest the instruction set offers, and the few operations the kernels need.
//
// Arithmetic uses the compiler's vector types, so one source serves every instruction set; intrinsics appear
// only where they do what the vector types cannot say (masked loads, half precision, the transposing sums).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

// A loop over registers: unrolled early, arrays of vectors become registers; left to itself GCC spills them.
#define PAGED_UNROLLED(i, count) _Pragma("GCC unroll 32") for (int i = 0; i < (count); ++i)

namespace paged {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Rows of K and V are read in pairs of vectors, because two 16-bit values share one 32-bit lane.
constexpr int kPair = 2 * kLanes;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UVec __attribute__((vector_size(4 * kLanes)));
typedef float LooseVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

// The bits of a number, taken for another type.
template <class To, class From>
inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To to;
  std::memcpy(&to, &x, sizeof to);
  return to;
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<LooseVec*>(p) = v; }
inline Vec splat(float x) { return x - Vec{}; }
inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

inline float sum_of(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0.0f;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}

inline float max_of(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float top = v[0];
  for (int i = 1; i < kLanes; ++i) top = v[i] > top ? v[i] : top;
  return top;
#endif
}

// e^x for x <= 0, within 2 ulp; 0 below the smallest normal number (so exactly 0 for -inf); NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 is split in two so that n ln 2 is subtracted without rounding.
inline Vec exp_nonpositive(Vec x) {
  const Vec smallest = splat(-87.33654f);
  const Vec clamped = x < smallest ? smallest : x;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const Vec n = (clamped * 1.44269504f + magic) - magic;
  const Vec r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Vec e = p * (r * r) + r + 1.0f;
  const IVec power = (__builtin_convertvector(n, IVec) + 127) << 23;
  const Vec y = e * (Vec)power;
  return x < smallest ? Vec{} : y;
}

// c tanh(x / c), the soft cap of Gemma-2. Written with e^(-2|x|), which cannot overflow.
inline Vec softcap(Vec x, float cap) {
  const Vec y = x * (1.0f / cap);
  const Vec size = y < Vec{} ? -y : y;
  const Vec t = exp_nonpositive(-2.0f * size);
  const Vec tanh = (1.0f - t) / (1.0f + t);
  return cap * (y < Vec{} ? -tanh : tanh);
}

// Stores the sums of N vectors: out[i] = sum of acc[i]. Adding while transposing costs about two instructions
// a vector, against a dozen for summing each on its own. N is a multiple of 4; `out` has room for N rounded
// up to kLanes.
#if defined(__AVX512F__)

inline __m512 sum_quads(const Vec* acc) {  // in each 128-bit part: partial sums of acc[0..3]
  const __m512 a = (__m512)acc[0], b = (__m512)acc[1], c = (__m512)acc[2], d = (__m512)acc[3];
  const __m512d ab = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512d cd = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  return _mm512_add_ps((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
}

inline __m512 sum_parts(__m512 a, __m512 b) {  // adds neighbouring 128-bit parts: a's two sums, then b's
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

template <int N>
inline void store_sums(const Vec* acc, float* out) {
  static_assert(N % 4 == 0 && N <= 16, "whole quads, one vector of sums");
  __m512 quads[4];
  for (int i = 0; i < 4; ++i) quads[i] = 4 * i < N ? sum_quads(acc + 4 * i) : quads[0];
  _mm512_storeu_ps(out, sum_parts(sum_parts(quads[0], quads[1]), sum_parts(quads[2], quads[3])));
}

#elif defined(__AVX2__)

template <int N>
inline void store_sums(const Vec* acc, float* out) {
  static_assert(N % 4 == 0, "whole quads only");
  for (int i = 0; i < N; i += 4) {
    const __m256 ab = _mm256_hadd_ps((__m256)acc[i], (__m256)acc[i + 1]);
    const __m256 cd = _mm256_hadd_ps((__m256)acc[i + 2], (__m256)acc[i + 3]);
    const __m256 quad = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(out + i, _mm_add_ps(_mm256_castps256_ps128(quad), _mm256_extractf128_ps(quad, 1)));
  }
}

#else

template <int N>
inline void store_sums(const Vec* acc, float* out) {
  for (int i = 0; i < N; ++i) out[i] = sum_of(acc[i]);
}

#endif

}  // namespace paged
