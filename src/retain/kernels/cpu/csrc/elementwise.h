// What happens to one row of numbers between two products: norms, rotations, activations.
#pragma once

#include "simd.h"

namespace retain::RETAIN_ISA {

// A vector of a row of which n numbers are left.
INLINE F load_some(const float* x, int n) {
  if (n >= WIDTH) return load<WIDTH>(x);
  float some[WIDTH] = {};
  for (int i = 0; i < n; ++i) some[i] = x[i];
  return load<WIDTH>(some);
}
INLINE void store_some(float* x, int n, F y) {
  if (n >= WIDTH) {
    store<WIDTH>(x, y);
  } else {
    for (int i = 0; i < n; ++i) x[i] = y[i];
  }
}

INLINE void normalise_row(const Norm& norm, const float* x, int n, bool add, float* out) {
  float mean = 0;
  if (norm.centred) {
    F total = {};
    for (int i = 0; i < n; i += WIDTH) total += load_some(x + i, n - i);
    mean = sum<WIDTH>(total) / n;
  }
  F squares = {};
  for (int i = 0; i < n; i += WIDTH) {
    F y = load_some(x + i, n - i) - mean;
    if (n - i < WIDTH) y = (lanes() < splat(int32_t(n - i))) ? y : F{};
    squares += y * y;
  }
  const float by = 1 / __builtin_sqrtf(sum<WIDTH>(squares) / n + norm.eps);
  for (int i = 0; i < n; i += WIDTH) {
    F y = (load_some(x + i, n - i) - mean) * by * load_some(norm.weight + i, n - i);
    if (norm.bias) y += load_some(norm.bias + i, n - i);
    if (add) y += load_some(out + i, n - i);
    store_some(out + i, n - i, y);
  }
}

INLINE void turn_row(float* x, const float* angles, int n, bool neighbours) {
  const float *cos = angles, *sin = angles + n;
  if (neighbours) {
    for (int i = 0; i < n; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for (int i = 0; i < n; i += WIDTH) {
    const int some = n - i;
    const F a = load_some(x + i, some), b = load_some(x + n + i, some);
    const F c = load_some(cos + i, some), s = load_some(sin + i, some);
    store_some(x + i, some, a * c - b * s);
    store_some(x + n + i, some, b * c + a * s);
  }
}

INLINE F sigmoid(F x) {  // by e^-|x|, which cannot overflow
  const F e = exp<float>(-absolute(x));
  return (x < 0.0f ? e : splat(1.0f)) / (e + 1.0f);
}

template <Activation A>
INLINE F active(F x) {
  if constexpr (A == Activation::relu) return max(x, F{});
  if constexpr (A == Activation::silu) return x * sigmoid(x);
  if constexpr (A == Activation::gelu_tanh)  // (1 + tanh y) / 2 = sigmoid(2 y)
    return x * sigmoid(x * (x * x * 0.044715f + 1.0f) * 1.5957691216057308f);
  if constexpr (A == Activation::gelu) {
    F y;
    for (int l = 0; l < WIDTH; ++l) y[l] = 0.5f * x[l] * (1 + __builtin_erff(x[l] * 0.70710678f));
    return y;
  }
}

template <Activation A>
INLINE void activate_row(const float* x, const float* times, int n, float* out) {
  for (int i = 0; i < n; i += WIDTH) {
    F y = active<A>(load_some(x + i, n - i));
    if (times) y *= load_some(times + i, n - i);
    store_some(out + i, n - i, y);
  }
}

}  // namespace retain::RETAIN_ISA
