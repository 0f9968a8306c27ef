// The rotation of formats/rotation.py: signs, then the fast Walsh-Hadamard transform of each part, over
// sqrt(n). The same sums are taken in the same order as there, so results are equal to the bit.
#pragma once

#include "../base/simd.h"

namespace paged {

inline int64_t part_size(int64_t dim) { return dim & -dim; }

// v[i ^ kStep] in place i, for steps within a vector.
template <int kStep>
inline Vec swap_lanes(Vec v) {
#if defined(__AVX512F__)
  if constexpr (kStep == 1) return (Vec)_mm512_permute_ps((__m512)v, 0xb1);
  if constexpr (kStep == 2) return (Vec)_mm512_permute_ps((__m512)v, 0x4e);
  if constexpr (kStep == 4) return (Vec)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1);
  if constexpr (kStep == 8) return (Vec)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e);
#elif defined(__AVX2__)
  if constexpr (kStep == 1) return (Vec)_mm256_permute_ps((__m256)v, 0xb1);
  if constexpr (kStep == 2) return (Vec)_mm256_permute_ps((__m256)v, 0x4e);
  if constexpr (kStep == 4) return (Vec)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1);
#else
  if constexpr (kStep == 1) return Vec{v[1], v[0], v[3], v[2]};
  if constexpr (kStep == 2) return Vec{v[2], v[3], v[0], v[1]};
#endif
}

// Sums in lanes i without kStep, differences in the others.
template <int kStep>
inline void butterflies_within(float* x, int64_t padded, int64_t n) {
  if constexpr (kStep < kLanes) {
    if (kStep >= n) return;
    Vec sign;
    for (int i = 0; i < kLanes; ++i) sign[i] = (i & kStep) != 0 ? -1.0f : 1.0f;
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Vec v = load(x + i);
      store(x + i, swap_lanes<kStep>(v) + v * sign);
    }
  }
}

// In place, of `dim` floats at `x`; all up to `dim` rounded up to kLanes are read and written.
inline void transform(float* x, int64_t dim) {
  const int64_t n = part_size(dim);
  if (n == 1) return;
  const int64_t padded = round_up(dim, kLanes);
  butterflies_within<1>(x, padded, n);
  butterflies_within<2>(x, padded, n);
  butterflies_within<4>(x, padded, n);
  butterflies_within<8>(x, padded, n);
  for (int64_t step = kLanes; step < n; step *= 2) {
    for (int64_t pair = 0; pair < dim; pair += 2 * step) {
      for (int64_t i = pair; i < pair + step; i += kLanes) {
        const Vec a = load(x + i), b = load(x + i + step);
        store(x + i, a + b);
        store(x + i + step, a - b);
      }
    }
  }
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(n)));
  for (int64_t i = 0; i < padded; i += kLanes) store(x + i, load(x + i) * factor);
}

inline void apply_signs(float* x, int64_t dim) {
  if (part_size(dim) == 1) return;
  UVec index;
  for (int i = 0; i < kLanes; ++i) index[i] = static_cast<uint32_t>(i);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const UVec channel = index + static_cast<uint32_t>(i);
    UVec pairs = channel & (channel >> 1) & 0x5555u;  // b0 b1, b2 b3, ...; their parity is the sign
    pairs = pairs ^ (pairs >> 8);
    pairs = pairs ^ (pairs >> 4);
    pairs = pairs ^ (pairs >> 2);
    store(x + i, (Vec)((UVec)load(x + i) ^ (pairs << 31)));
  }
}

__attribute__((noinline)) inline void rotate(float* x, int64_t dim) {
  apply_signs(x, dim);
  transform(x, dim);
}

__attribute__((noinline)) inline void unrotate(float* x, int64_t dim) {
  transform(x, dim);
  apply_signs(x, dim);
}

}  // namespace paged
