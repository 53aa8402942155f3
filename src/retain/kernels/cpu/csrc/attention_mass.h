// What an observed tile leaves: weights of tempered and noised scores, and their sums over its rows.
#pragma once

#include "simd.h"

namespace retain::RETAIN_ISA {

using U = Lanes<WIDTH>::u;

// The inverse of the error function (Giles, "Approximating the erfinv function", single precision).
INLINE F erfinv(F x) {
  const F w = -log<float>((1.0f - x) * (1.0f + x));
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

// Uniform between 0 and 1, 23 bits and half a step.
INLINE F uniform(uint32_t key, I pos) {
  const U h = mix(key + GOLDEN * (U)pos);
  return (__builtin_convertvector((I)(h >> 9), F) + 0.5f) * 0x1p-23f;
}

// What a query leaves on slots: the weight w = e^d that it attends by, or that of its score tempered, e^(d / tau), and
// either times e^(noise / tau). All are relative to the score's own maximum in the span. A constant changes no softmax.
enum class Way { nothing, as_it_is, tempered, noised, tempered_noised };

struct Leave {
  Way way;
  float by;  // 1 / tau
};

template <class T, Way WAY>
INLINE F leave_on(const Leave& l, F d, F w, const float* noise) {
  if constexpr (WAY == Way::as_it_is) return w;
  if constexpr (WAY == Way::tempered) return exp<T>(d * l.by);
  return (WAY == Way::noised ? w : exp<T>(d * l.by)) * load<WIDTH>(noise);
}

INLINE Leave leave_of(const Attend& a, const Tile& t, int token) {
  const Observe& o = a.observe;
  if (o.weights[token] == 0) return {Way::nothing, 1};
  const Noise kind = Noise(o.noise[t.b]);
  const bool one = o.tau[token] == 1.0f, noised = kind == Noise::gumbel || kind == Noise::gaussian;
  return {noised ? (one ? Way::noised : Way::tempered_noised) : (one ? Way::as_it_is : Way::tempered), 1 / o.tau[token]};
}

// e^(noise / tau) for all slots of n pages: drawn for a query and a kv head, and so the same for the query heads there.
template <class T>
void draw(const Attend& a, const Tile& t, int token, float by, int n, const int32_t* const* pos, float* to) {
  const Observe& o = a.observe;
  const uint32_t key = noise_key(o.seed[t.b], o.layer, t.g, o.anew[t.b] ? a.q_pos[token] : -1);
  const int S = a.kv.S;
  for (int j = 0; j < n; ++j)
    for (int s = 0; s < S; s += WIDTH) {
      const F u = uniform(key, load_ints(pos[j] + s));
      F y;
      if (Noise(o.noise[t.b]) == Noise::gaussian) {
        y = exp<T>((0.5772157f + 1.2825498f * 1.41421356f * erfinv(2.0f * u - 1.0f)) * by);
      } else {
        const F e = -log<T>(u);  // e^noise = 1 / e
        y = by == 1.0f ? reciprocal<T>(e) : exp<T>(-log<T>(e) * by);
      }
      store<WIDTH>(to + j * S + s, y);
    }
}

// Sums over a tile's rows of factor * weight, [columns, slots]; or, without a place for them, straight into the masses
// of its pages. A factor of 0 means that there is no weight to read.
template <class T>
void fold_rows(const Attend& a, const Tile& t, const Seen& seen, const float* factors, float* sums) {
  const int columns = a.kv.columns, rows = t.rows(), S = a.kv.S, per_span = pages_per_span(a.kv);
  const int32_t* table = a.tables.of(t.b, t.g);
  const float decay = a.observe.decay[t.b];
  const int pages = a.tables.count(t.b, t.g);
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
      const int end = (span + 1) * per_span < pages ? (span + 1) * per_span : pages;
      for (int i = span * per_span; i < end; ++i) {
        const int64_t at = int64_t(i) * S;
        float* mass = a.kv.mass_page(table[i]) + c * S;
        for (int s = 0; s < S; s += WIDTH) {
          F sum = {};
          for (int r = 0; r < n; ++r) sum += factor[r] * load<WIDTH>(row[r] + at + s);
          if (sums)
            store<WIDTH>(sums + c * seen.slots + at + s, sum);
          else
            store<WIDTH>(mass + s, load<WIDTH>(mass + s) * decay + sum);
        }
      }
    }
}

}  // namespace retain::RETAIN_ISA
