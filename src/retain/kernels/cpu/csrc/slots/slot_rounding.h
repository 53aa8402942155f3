// The rotation and the rounding of slots: integers and scales are those of kernels/slots/quantized_slots.py, to the bit.
#pragma once

#include <utility>

#include "isa/elementwise.h"

namespace retain::RETAIN_ISA {

// Sums and differences of lanes H apart: a lane with bit H has the difference.
template <int H, int... LANES>
INLINE F butterfly(F x, std::integer_sequence<int, LANES...>) {
  const I sign = {(LANES & H ? INT32_MIN : 0)...};
  return F{x[LANES ^ H]...} + (F)((I)x ^ sign);
}

// Applies the steps of the transform from numbers H apart to n vectors.
template <int H, int N>
INLINE void butterflies(F (&x)[N]) {
  if constexpr (H < WIDTH) {
    for (F& y : x) y = butterfly<H>(y, std::make_integer_sequence<int, WIDTH>());
    butterflies<2 * H>(x);
  } else if constexpr (H < N * WIDTH) {
    constexpr int STEP = H / WIDTH;
    for (int i = 0; i < N; ++i) {
      if (i & STEP) continue;
      const F a = x[i], b = x[i + STEP];
      x[i] = a + b, x[i + STEP] = a - b;
    }
    butterflies<2 * H>(x);
  }
}

// Transforms a block of N vectors.
template <int N>
INLINE void rotate_block(float* to, float factor) {
  F x[N];
  memcpy(x, to, sizeof x);
  butterflies<1>(x);
  for (F& y : x) y *= factor;
  memcpy(to, x, sizeof x);
}

// Transforms a block of n numbers, fewer than a vector has.
INLINE void rotate_short_block(float* x, int n, float factor) {
  for (int h = 1; h < n; h *= 2)
    for (int i = 0; i < n; ++i) {
      if (i & h) continue;
      const float a = x[i], b = x[i + h];
      x[i] = a + b, x[i + h] = a - b;
    }
  for (int i = 0; i < n; ++i) x[i] *= factor;
}

// Transforms D numbers as `rotate` does.
INLINE void rotate(float* x, int D) {
  static_assert(MAX_K_DIM < 1024, "a block has at most 2^9 numbers");
  const int block = D & -D;
  const float factor = float(1 / __builtin_sqrt(block));
  for (float* y = x; y < x + D; y += block) {
    switch (block / WIDTH) {
      case 0: rotate_short_block(y, block, factor); break;
#define CASE(n)                                                       \
  case n:                                                             \
    if constexpr (n * WIDTH <= MAX_K_DIM) rotate_block<n>(y, factor); \
    break;
        CASE(1) CASE(2) CASE(4) CASE(8) CASE(16) CASE(32) CASE(64) CASE(128)
#undef CASE
    }
  }
}

constexpr float LARGEST_INTEGER = 127;
constexpr float SMALLEST_SCALE = 0x1p-100f;  // what is smaller counts as 0: its inverse might be infinite

// Returns the inverse of a scale of integers.
INLINE float inverse(float scale) { return __builtin_fabsf(scale) > SMALLEST_SCALE ? 1.0f / scale : 0.0f; }

// Rounds x * factor to integers between `low` and `high`, and adds `excess`.
INLINE I round_and_clamp(F x, float factor, float low, float high, int excess) {
  const F y = max(x * factor, splat(low));
  return round_to_int(y > high ? splat(high) : y) + excess;
}

// Rounds n numbers to bytes, and returns the scale. The last vector of bytes may reach behind `to` + n.
INLINE uint16_t round_to_bytes(const float* x, int n, int8_t* to) {
  F largest = {};
  for (int i = 0; i < n; i += WIDTH) largest = max(largest, absolute(load_tail(x + i, n - i)));
  const uint16_t scale = float_to_bf16(reduce_max<WIDTH>(largest) / LARGEST_INTEGER);
  const float factor = inverse(bf16_to_float(scale));
  for (int i = 0; i < n; i += WIDTH)
    store_bytes(to + i, round_and_clamp(load_tail(x + i, n - i), factor, -LARGEST_INTEGER, LARGEST_INTEGER, 128));
  return scale;
}

// Returns the number of the largest magnitude, the first of several.
INLINE float largest_of(const float* x, int n) {
  F above = {}, below = {};
  for (int i = 0; i < n; i += WIDTH) {
    const F y = load_tail(x + i, n - i);
    above = max(above, y), below = max(below, -y);
  }
  const float positive = reduce_max<WIDTH>(above), negative = reduce_max<WIDTH>(below);
  if (positive != negative) return positive > negative ? positive : -negative;
  for (int i = 0; i < n; ++i)
    if (__builtin_fabsf(x[i]) == positive) return x[i];
  return x[0];
}

// Rounds a group of n numbers to nibbles, n / 2 bytes, and returns the scale. The last vector of bytes may reach behind
// `to` + n / 2.
INLINE uint16_t round_to_nibbles(const float* x, int n, int8_t* to) {
  const uint16_t scale = float_to_bf16(largest_of(x, n) / -8.0f);
  const float factor = inverse(bf16_to_float(scale));
  for (int i = 0, half = n / 2; i < half; i += WIDTH) {
    const F low = load_tail(x + i, half - i), high = load_tail(x + half + i, half - i);
    store_bytes(to + i, round_and_clamp(low, factor, -8, 7, 8) | round_and_clamp(high, factor, -8, 7, 8) << 4);
  }
  return scale;
}

}  // namespace retain::RETAIN_ISA
