// Row operations between two products: norms, RoPE, activations.
#pragma once

#include <algorithm>

#include "isa/simd.h"

namespace retain::RETAIN_ISA {

INLINE void normalize_row(const NormParams& norm, const float* x, int n, bool add, float* out) {
  float mean = 0;
  if (norm.subtract_mean) {
    F total = {};
    for (int i = 0; i < n; i += WIDTH) total += load_tail(x + i, n - i);
    mean = reduce_sum<WIDTH>(total) / n;
  }
  F squares = {};
  for (int i = 0; i < n; i += WIDTH) {
    F y = load_tail(x + i, n - i) - mean;
    if (n - i < WIDTH) y = (lane_indices() < splat(int32_t(n - i))) ? y : F{};
    squares += y * y;
  }
  const float factor = 1 / __builtin_sqrtf(reduce_sum<WIDTH>(squares) / n + norm.eps);
  for (int i = 0; i < n; i += WIDTH) {
    F y = (load_tail(x + i, n - i) - mean) * factor * load_tail(norm.weight + i, n - i);
    if (norm.bias) y += load_tail(norm.bias + i, n - i);
    if (add) y += load_tail(out + i, n - i);
    store_tail(out + i, n - i, y);
  }
}

// Sets out[r][k] to the product of n numbers of x[r] and of row k of `a`. Each is one chain of sums, whatever R and K are.
template <int R, int K, class T>
INLINE void multiply_rows(const float* const* x, const T* a, int n, float (*out)[MAX_LOW_RANK]) {
  F sums[R][K] = {};
  int i = 0;
  for (; i + WIDTH <= n; i += WIDTH) {
    F factors[K];
    for (int k = 0; k < K; ++k) factors[k] = load<WIDTH>(a + int64_t(k) * n + i);
    for (int r = 0; r < R; ++r) {
      const F y = load<WIDTH>(x[r] + i);
      for (int k = 0; k < K; ++k) sums[r][k] += y * factors[k];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < K; ++k) {
      out[r][k] = reduce_sum<WIDTH>(sums[r][k]);
      for (int l = i; l < n; ++l) out[r][k] += x[r][l] * to_float(a[int64_t(k) * n + l]);
    }
}

// Adds what an adapter gives to R rows, which share what is loaded of its matrices.
template <int R, class T>
INLINE void low_rank_rows(const LowRank& p, int adapter, const float* const* x, float* const* out) {
  const T* const a = reinterpret_cast<const T*>(p.a) + int64_t(adapter) * p.rank * p.in;
  const T* const b = reinterpret_cast<const T*>(p.b) + int64_t(adapter) * p.rank * p.columns;
  const int rank = std::min(p.ranks[adapter], p.rank), n = p.columns;
  float low[R][MAX_LOW_RANK];
  int k = 0;
  for (; k + 4 <= rank; k += 4)
    multiply_rows<R, 4>(x, a + int64_t(k) * p.in, p.in, reinterpret_cast<float(*)[MAX_LOW_RANK]>(&low[0][k]));
  for (; k < rank; ++k)
    multiply_rows<R, 1>(x, a + int64_t(k) * p.in, p.in, reinterpret_cast<float(*)[MAX_LOW_RANK]>(&low[0][k]));
  constexpr int N = 4;
  int j = 0;
  for (; j + N * WIDTH <= n; j += N * WIDTH) {
    F sums[R][N];
    for (int r = 0; r < R; ++r)
      for (int l = 0; l < N; ++l) sums[r][l] = load<WIDTH>(out[r] + j + l * WIDTH);
    for (k = 0; k < rank; ++k) {
      F factors[N];
      for (int l = 0; l < N; ++l) factors[l] = load<WIDTH>(b + int64_t(k) * n + j + l * WIDTH);
      for (int r = 0; r < R; ++r)
        for (int l = 0; l < N; ++l) sums[r][l] += low[r][k] * factors[l];
    }
    for (int r = 0; r < R; ++r)
      for (int l = 0; l < N; ++l) store<WIDTH>(out[r] + j + l * WIDTH, sums[r][l]);
  }
  for (; j < n; ++j)
    for (int r = 0; r < R; ++r)
      for (k = 0; k < rank; ++k) out[r][j] += low[r][k] * to_float(b[int64_t(k) * n + j]);
}

template <class T>
INLINE void low_rank_rows(const LowRank& p, int adapter, const float* const* x, float* const* out, int rows) {
  constexpr int R = FEW_REGISTERS ? 2 : MAX_LOW_RANK_ROWS;
  int r = 0;
  for (; r + R <= rows; r += R) low_rank_rows<R, T>(p, adapter, x + r, out + r);
  for (; r < rows; ++r) low_rank_rows<1, T>(p, adapter, x + r, out + r);
}

INLINE void rope_row(float* x, const float* angles, int n, bool interleaved) {
  const float *cos = angles, *sin = angles + n;
  if (interleaved) {
    for (int i = 0; i < n; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for (int i = 0; i < n; i += WIDTH) {
    const int left = n - i;
    const F a = load_tail(x + i, left), b = load_tail(x + n + i, left);
    const F c = load_tail(cos + i, left), s = load_tail(sin + i, left);
    store_tail(x + i, left, a * c - b * s);
    store_tail(x + n + i, left, b * c + a * s);
  }
}

INLINE F sigmoid(F x) {  // from e^-|x|, which cannot overflow
  const F e = exp<float>(-absolute(x));
  return (x < 0.0f ? e : splat(1.0f)) / (e + 1.0f);
}

INLINE F min(F x, F y) { return y < x ? y : x; }  // NaN where x is

template <Activation A>
INLINE F activation(F x) {
  if constexpr (A == Activation::relu) return max(F{}, x);  // NaN where x is
  if constexpr (A == Activation::sigmoid) return sigmoid(x);
  if constexpr (A == Activation::relu2) return max(F{}, x) * max(F{}, x);
  if constexpr (A == Activation::swiglu_oai) {
    x = min(x, splat(7.0f));
    return x * sigmoid(x * 1.702f);
  }
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
INLINE void activate_row(const float* x, const float* gate, int n, float* out) {
  for (int i = 0; i < n; i += WIDTH) {
    F y = activation<A>(load_tail(x + i, n - i));
    if (gate) {
      F g = load_tail(gate + i, n - i);
      if constexpr (A == Activation::swiglu_oai) g = 1.0f - min(-min(g, splat(7.0f)), splat(7.0f));
      y *= g;
    }
    store_tail(out + i, n - i, y);
  }
}

}  // namespace retain::RETAIN_ISA
