// Turns keys that lie by slot (see Pool) into pages that lie by dimension, which is how scores are computed.
#pragma once

#include <utility>

#include "isa/simd.h"

namespace retain::RETAIN_ISA {

using Words = Lanes<WIDTH>::u;

// Exchanges the lanes of `a` that have bit STEP with those of `b` that lack it.
template <int STEP, int... LANES>
INLINE void exchange_lanes(Words& a, Words& b, std::integer_sequence<int, LANES...>) {
  const Words x = a, y = b;
#ifdef __clang__
  a = __builtin_shufflevector(x, y, (LANES & STEP ? WIDTH + LANES - STEP : LANES)...);
  b = __builtin_shufflevector(x, y, (LANES & STEP ? WIDTH + LANES : LANES + STEP)...);
#else
  a = __builtin_shuffle(x, y, Words{(LANES & STEP ? WIDTH + LANES - STEP : LANES)...});
  b = __builtin_shuffle(x, y, Words{(LANES & STEP ? WIDTH + LANES : LANES + STEP)...});
#endif
}

template <int STEP>
INLINE void exchange_steps(Words (&x)[WIDTH]) {
  _Pragma("GCC unroll 16") for (int i = 0; i < WIDTH; ++i)
    if (!(i & STEP)) exchange_lanes<STEP>(x[i], x[i + STEP], std::make_integer_sequence<int, WIDTH>());
  if constexpr (STEP > 1) exchange_steps<STEP / 2>(x);
}

// Copies n words of each of m <= S keys into a page [n, S]: word d of keys[j] to to[d * S + j].
INLINE void transpose_keys(const uint32_t* const* keys, int m, int n, int S, uint32_t* to) {
  int j = 0;
  for (; j + WIDTH <= m; j += WIDTH) {
    int d = 0;
    for (; d + WIDTH <= n; d += WIDTH) {
      Words x[WIDTH];
      _Pragma("GCC unroll 16") for (int i = 0; i < WIDTH; ++i) memcpy(&x[i], keys[j + i] + d, sizeof x[i]);
      exchange_steps<WIDTH / 2>(x);
      _Pragma("GCC unroll 16") for (int i = 0; i < WIDTH; ++i) memcpy(to + (d + i) * S + j, &x[i], sizeof x[i]);
    }
    for (; d < n; ++d)
      for (int i = 0; i < WIDTH; ++i) to[d * S + j + i] = keys[j + i][d];
  }
  for (; j < m; ++j)
    for (int d = 0; d < n; ++d) to[d * S + j] = keys[j][d];
}

// Returns a page's keys by dimension, with their scales behind them. Keys by slot are transposed into page i of `memory`.
INLINE const void* keys_by_dimension(const Pool& kv, int64_t page, char* memory, int i) {
  if (!kv.has_keys_by_slot()) return kv.key_page(page);
  const uint32_t* const first = static_cast<const uint32_t*>(kv.key_page(page));
  const int n = kv.key_words(), S = kv.S;
  uint32_t* const to = reinterpret_cast<uint32_t*>(memory + i * kv.key_bytes());
  for (int s = 0; s < S; s += 16) {
    const uint32_t* keys[16];
    for (int j = 0; j < 16; ++j) keys[j] = first + (s + j) * n;
    transpose_keys(keys, 16, n, S, to + s);
  }
  memcpy(to + S * n, first + S * n, kv.key_bytes() - 4 * S * n);
  return to;
}

}  // namespace retain::RETAIN_ISA
