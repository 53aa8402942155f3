// What an observed tile leaves: weights of tempered and noised scores, and their sums over its rows.
#pragma once

#include "simd.h"

namespace retain::RETAIN_ISA {

using U = Lanes<WIDTH>::u;

INLINE U mix(U x) {
  x = (x ^ (x >> 16)) * 0x7feb352d;
  x = (x ^ (x >> 15)) * 0x846ca68b;
  return x ^ (x >> 16);
}

// ln x of normal x > 0, to 2e-7 of itself also near 1 (Cephes' polynomial).
INLINE F log(F x) {
  const F half = splat(0.70710678f);
  const I bits = (I)x;
  I e = ((bits >> 23) & 255) - 126;
  F m = (F)((bits & 0x7fffff) | 0x3f000000);  // 0.5 to 1
  const I small = m < half;
  e += small;  // -1 where it is
  m = small ? m + m : m;
  const F f = m - 1.0f, z = f * f, n = __builtin_convertvector(e, F);
  F p = f * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  F y = p * f * z - n * 2.12194440e-4f;
  y -= 0.5f * z;
  return f + y + n * 0.693359375f;
}

// The inverse of the error function (Giles, "Approximating the erfinv function", single precision).
INLINE F erfinv(F x) {
  const F w = -log((1.0f - x) * (1.0f + x));
  const F a = w - 2.5f;
  F p = a * 2.81022636e-08f + 3.43273939e-07f;
  p = p * a - 3.5233877e-06f;
  p = p * a - 4.39150654e-06f;
  p = p * a + 0.00021858087f;
  p = p * a - 0.00125372503f;
  p = p * a - 0.00417768164f;
  p = p * a + 0.246640727f;
  p = p * a + 1.50140941f;
  F b = w;
  for (int l = 0; l < WIDTH; ++l) b[l] = __builtin_sqrtf(w[l]);
  b -= 3.0f;
  F q = b * -0.000200214257f + 0.000100950558f;
  q = q * b + 0.00134934322f;
  q = q * b - 0.00367342844f;
  q = q * b + 0.00573950773f;
  q = q * b - 0.0076224613f;
  q = q * b + 0.00943887047f;
  q = q * b + 1.00167406f;
  q = q * b + 2.83297682f;
  return (w < 5.0f ? p : q) * x;
}

template <Noise KIND>
INLINE F draw(uint32_t key, I pos) {
  const U h = mix(key + GOLDEN * (U)pos);
  const F u = (__builtin_convertvector((I)(h >> 9), F) + 0.5f) * 0x1p-23f;
  if constexpr (KIND == Noise::gumbel) return -log(-log(u));
  return 0.5772157f + 1.2825498f * 1.41421356f * erfinv(2.0f * u - 1.0f);
}

// y = (x + noise) / tau for the scores of one row and page.
template <Noise KIND>
INLINE void temper_page(const float* x, const int32_t* pos, int S, uint32_t key, float by, float* y) {
  for (int s = 0; s < S; s += WIDTH) {
    F score = load<WIDTH>(x + s);
    if constexpr (KIND != Noise::none) score += draw<KIND>(key, load_ints(pos + s));
    store<WIDTH>(y + s, score * by);
  }
}

INLINE void temper(Noise kind, const float* x, const int32_t* pos, int S, uint32_t key, float by, float* y) {
  switch (kind) {
    case Noise::gumbel: return temper_page<Noise::gumbel>(x, pos, S, key, by, y);
    case Noise::gaussian: return temper_page<Noise::gaussian>(x, pos, S, key, by, y);
    default: return temper_page<Noise::none>(x, pos, S, key, by, y);  // a constant changes no softmax
  }
}

// mass [columns, slots] = sum over rows of factor * weight. A factor of 0 means that there is no weight to read.
template <class T>
void fold_rows(const Attend& a, const Tile& t, const Seen& seen, const float* factors, float* mass) {
  const int columns = a.kv.columns, rows = t.rows();
  const int64_t per_span = int64_t(pages_per_span(a.kv)) * a.kv.S;
  for (int c = 0; c < columns; ++c)
    for (int span = 0; span < seen.spans; ++span) {
      float factor[TILE_ROWS];
      const T* row[TILE_ROWS];
      int n = 0;
      for (int r = 0; r < rows; ++r) {
        if (columns > 1 && (t.begin + r) % a.R != c) continue;
        factor[n] = factors[r * seen.spans + span];
        row[n] = reinterpret_cast<const T*>(seen.weights) + r * seen.slots;
        n += factor[n] != 0;
      }
      const int64_t end = (span + 1) * per_span < seen.slots ? (span + 1) * per_span : seen.slots;
      for (int64_t s = span * per_span; s < end; s += WIDTH) {
        F sum = {};
        for (int r = 0; r < n; ++r) sum += factor[r] * load<WIDTH>(row[r] + s);
        store<WIDTH>(mass + c * seen.slots + s, sum);
      }
    }
}

}  // namespace retain::RETAIN_ISA
