// Vectors of float32 in GCC's and Clang's own notation, so that one source serves every instruction set. Everything
// lives in the namespace of that set, for the reason that inner.h gives.
#pragma once

#include <cstdint>
#include <cstring>

#include "inner.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace retain::RETAIN_ISA {

template <int W>
struct Lanes {
  typedef float f __attribute__((vector_size(4 * W)));
  typedef int32_t i __attribute__((vector_size(4 * W)));
  typedef uint32_t u __attribute__((vector_size(4 * W)));
  typedef uint16_t h __attribute__((vector_size(2 * W)));
};

constexpr int WIDTH = RETAIN_WIDTH;
using F = Lanes<WIDTH>::f;
using I = Lanes<WIDTH>::i;

struct bf16 {
  uint16_t bits;
};

template <int W>
INLINE typename Lanes<W>::f load(const float* p) {
  typename Lanes<W>::f x;
  memcpy(&x, p, sizeof x);
  return x;
}

template <int W>
INLINE typename Lanes<W>::f load(const bf16* p) {  // a bfloat16 is the upper half of a float32
  typename Lanes<W>::h x;
  memcpy(&x, p, sizeof x);
#ifdef __AVX512BW__  // one shuffle to the odd places of zeros; compilers find none of these by themselves
  if constexpr (W == 16) {
    const __m512i from = _mm512_slli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 16);
    return (__m512)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, from, _mm512_castsi256_si512((__m256i)x));
  }
#endif
#ifdef __AVX2__
  if constexpr (W == 8) return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)x), 16);
#endif
  return (typename Lanes<W>::f)(__builtin_convertvector(x, typename Lanes<W>::u) << 16);
}

template <int W>
INLINE void store(float* p, typename Lanes<W>::f x) {
  memcpy(p, &x, sizeof x);
}

INLINE I load_ints(const int32_t* p) {
  I x;
  memcpy(&x, p, sizeof x);
  return x;
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) { return bf16_to_float(x.bits); }
INLINE void from_float(float x, float& to) { to = x; }
INLINE void from_float(float x, bf16& to) { to.bits = float_to_bf16(x); }

INLINE F splat(float x) { return x - F{}; }
INLINE I splat(int32_t x) { return x - I{}; }
INLINE F max(F a, F b) { return a > b ? a : b; }

// Lane by lane into one number, by halves.
template <int W>
INLINE float sum(typename Lanes<W>::f x) {
  if constexpr (W == 1) {
    return x[0];
  } else {
    typename Lanes<W / 2>::f half[2];
    memcpy(half, &x, sizeof x);
    return sum<W / 2>(half[0] + half[1]);
  }
}
template <int W>
INLINE float highest(typename Lanes<W>::f x) {
  if constexpr (W == 1) {
    return x[0];
  } else {
    typename Lanes<W / 2>::f half[2];
    memcpy(half, &x, sizeof x);
    return highest<W / 2>(half[0] > half[1] ? half[0] : half[1]);
  }
}
template <int W>
INLINE int32_t any(typename Lanes<W>::i x) {
  if constexpr (W == 1) {
    return x[0];
  } else {
    typename Lanes<W / 2>::i half[2];
    memcpy(half, &x, sizeof x);
    return any<W / 2>(half[0] | half[1]);
  }
}

// e^x for x <= 0, to 2e-7 of itself; exactly 0 below -86, so also at -inf.
INLINE F exp(F x) {
  const F magic = splat(0x1.8p23f);  // adding it leaves the nearest integer in the low bits
  F y = max(x, splat(-87.0f));
  F n = y * 0x1.715476p0f + magic;
  I exponent = (I)n << 23;
  n -= magic;
  F r = y - n * 0x1.62e4p-1f;  // ln 2 in two parts: n times the first is exact
  r -= n * 0x1.7f7d1cp-20f;
  F p = r * 0x1.10621ep-7f + 0x1.572adap-5f;  // minimax over half of ln 2 either side of 0, 1 + r kept
  p = p * r + 0x1.5557bp-3f;
  p = p * r + 0x1.fffdfap-2f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  F e = (F)((I)p + exponent);
  return x > -86.0f ? e : F{};
}

}  // namespace retain::RETAIN_ISA
