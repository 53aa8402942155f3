// The rows of a tile look at one span of their table: scores, softmax, values.
//
// Three passes over the span's slots, so that the maximum is known before the first exponential and nothing is
// ever rescaled inside a span. Pages in which nobody sees anything are not touched at all; that alone makes a
// window, a causal prefill and a padded table cheap.
#pragma once

#include "inner.h"
#include "observe.h"
#include "product.h"
#include "simd.h"

namespace retain::RETAIN_ISA {

constexpr float NOTHING = -__builtin_inff();
constexpr int MAX_PAGES = SPAN / 16;  // of the smallest page, in a span

enum class Sight { none, some, all };

// A query at p sees slot s iff 0 <= pos[s] <= p and (p - pos[s] < window or pos[s] < sinks). The window test is
// turned round, pos[s] > p - window, for a hole's position must not be subtracted from a large p.
INLINE int32_t before_window(int32_t p, int32_t window) {
  int64_t x = int64_t(p) - window;
  return x < INT32_MIN ? INT32_MIN : int32_t(x);
}
INLINE I sees(I pos, int32_t p, int32_t window, int32_t sinks) {
  return (pos >= 0) & (pos <= p) & ((pos > before_window(p, window)) | (pos < sinks));
}

// What queries from position `low` to `high` see of a page: `none` and `all` are certain, `some` asks for a mask.
INLINE Sight sight(const int32_t* pos, int S, int32_t low, int32_t high, int32_t window, int32_t sinks) {
  const int32_t before_low = before_window(low, window), before_high = before_window(high, window);
  I someone = {}, not_all = {};
  for (int s = 0; s < S; s += WIDTH) {
    I x = load_ints(pos + s);
    I sink = x < sinks;
    someone |= (x >= 0) & (x <= high) & ((x > before_low) | sink);
    not_all |= ~((x >= 0) & (x <= low) & ((x > before_high) | sink));
  }
  if (!any<WIDTH>(someone)) return Sight::none;
  return any<WIDTH>(not_all) ? Sight::some : Sight::all;
}

// The queries of a tile as rows, scaled, of the pool's type.
template <class Q, class T>
void gather(const Attend& a, const Tile& t, T* rows) {
  const int D = a.kv.D, first = a.tables.starts[t.b];
  for (int i = t.begin; i < t.end; ++i, rows += D) {
    const Q* q = static_cast<const Q*>(a.q.data) + (first + i / a.R) * a.q.token + (t.g * a.R + i % a.R) * a.q.head;
    for (int d = 0; d < D; ++d) from_float(a.scale * to_float(q[d]), rows[d]);
  }
}

// Add a slope times the distance, and hide what a row does not see. x points at a page's scores of the first row.
INLINE void adjust(const Attend& a, const Tile& t, const int32_t* pos, bool mask, float* x) {
  for (int i = t.begin; i < t.end; ++i, x += SCORES) {
    const int32_t p = a.q_pos[a.tables.starts[t.b] + i / a.R];
    for (int s = 0; s < a.kv.S; s += WIDTH) {
      I at = load_ints(pos + s);
      F y = load<WIDTH>(x + s);
      if (a.slopes) y += a.slopes[t.g * a.R + i % a.R] * __builtin_convertvector(at - p, F);
      if (mask) y = sees(at, p, a.tables.window_of(t.b), a.tables.sinks_of(t.b)) ? y : splat(NOTHING);
      store<WIDTH>(x + s, y);
    }
  }
}

// Scores to weights of the pool's type, in place: a weight is never longer than its score. `top` is their maximum.
// Returns the sum.
template <class T>
INLINE float weigh(float* x, int slots, float top) {
  const F from = splat(top == NOTHING ? 0.0f : top);  // a row that sees nothing: every weight is e^-inf = 0
  F total = {};
  T* to = reinterpret_cast<T*>(x);
  for (int s = 0; s < slots; s += WIDTH) {
    const F w = exp<T>(load<WIDTH>(x + s) - from);
    total += w;
    store_as(to + s, w);
  }
  return sum<WIDTH>(total);
}

// The same, page by page, and beside it what an observed row leaves: kept[places[j] * S] on page j. `sums` are of both.
template <class T, Way WAY>
INLINE void weigh_and_leave(float* x, float top, const Leave& leave, const int32_t* const* pos, const int* places, int n,
                            int S, T* kept, float (&sums)[2]) {
  const F from = splat(top == NOTHING ? 0.0f : top);
  F total = {}, all = {};
  T* to = reinterpret_cast<T*>(x);
  for (int j = 0; j < n; ++j)
    for (int s = 0; s < S; s += WIDTH) {
      const F d = load<WIDTH>(x + j * S + s) - from, w = exp<T>(d);
      const F y = left<T, WAY>(leave, d, w, pos[j] + s);
      total += w;
      all += y;
      store_as(to + j * S + s, w);
      store_as(kept + int64_t(places[j]) * S + s, y);
    }
  sums[0] = sum<WIDTH>(total);
  sums[1] = sum<WIDTH>(all);
}

template <class T>
bool look_at(const Attend& a, const Tile& t, int span, float* scratch, float* records, const Seen* seen) {
  const int S = a.kv.S, D = a.kv.D, rows = t.rows();
  const int32_t* p = a.q_pos + a.tables.starts[t.b];
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (int i = t.begin / a.R; i <= (t.end - 1) / a.R; ++i) {
    low = p[i] < low ? p[i] : low;
    high = p[i] > high ? p[i] : high;
  }

  const int32_t* table = a.tables.of(t.b, t.g);
  const int per_span = pages_per_span(a.kv), owned = a.tables.count(t.b, t.g);
  const int first = span * per_span, last = first + per_span < owned ? first + per_span : owned;
  for (int i = first; i < owned && i < last + per_span; ++i)  // of this span and of the next
    for (int s = 0; s < S; s += 16) __builtin_prefetch(a.kv.pos + int64_t(table[i]) * S + s);
  int64_t page[MAX_PAGES];
  int places[MAX_PAGES];
  const int32_t* pos[MAX_PAGES];
  bool mask[MAX_PAGES];
  int n = 0;
  for (int i = first; i < last; ++i) {
    Sight it = sight(a.kv.pos + int64_t(table[i]) * S, S, low, high, a.tables.window_of(t.b), a.tables.sinks_of(t.b));
    page[n] = table[i];
    places[n] = i;
    pos[n] = a.kv.pos + int64_t(table[i]) * S;
    if (seen)
      for (int s = 0; s < a.kv.columns * S; s += 16) __builtin_prefetch(a.kv.mass_page(table[i]) + s, 1);
    mask[n] = it == Sight::some;
    n += it != Sight::none;
    if (it == Sight::none && seen)
      for (int r = 0; r < rows; ++r)
        memset(seen->weights + (r * seen->slots + int64_t(i) * S) * sizeof(T), 0, S * sizeof(T));
  }
  if (n == 0) return false;

  float* x = scratch;                                       // [rows, SCORES]
  T* q = reinterpret_cast<T*>(scratch + rows * SCORES);     // [rows, D]
  const T* weights = reinterpret_cast<const T*>(x);
  constexpr ptrdiff_t ROW = SCORES * sizeof(float) / sizeof(T);  // of weights
  if (a.q.type == Type::float32)
    gather<float>(a, t, q);
  else
    gather<bf16>(a, t, q);

  auto keys = [&](int j) { return static_cast<const T*>(a.kv.key_page(page[j])); };
  auto values = [&](int j) { return static_cast<const T*>(a.kv.value_page(page[j])); };
  const void* after = last < owned ? a.kv.key_page(table[last]) : values(n - 1);  // where the next span begins
  auto distance = [](const void* from, const void* to) { return intptr_t(to) - intptr_t(from); };

  for (int j = 0; j < n; ++j) {
    const ptrdiff_t ahead = distance(keys(j), j + 1 < n ? keys(j + 1) : values(0));
    multiply<T>({q, D, keys(j), DEEP<T> * S, D, x + j * S, SCORES, false, ahead}, rows, S);
    if (a.slopes || mask[j]) adjust(a, t, a.kv.pos + page[j] * S, mask[j], x + j * S);
  }
  const int size = record_size(D);
  for (int r = 0; r < rows; ++r) {
    float *record = records + r * size, *row = x + r * SCORES;
    F most = splat(NOTHING);
    for (int s = 0; s < n * S; s += WIDTH) most = max(most, load<WIDTH>(row + s));
    const float top = record_max(record, D) = highest<WIDTH>(most);
    const int token = a.tables.starts[t.b] + (t.begin + r) / a.R;
    if (!seen || a.observe.weights[token] == 0) {
      record_sum(record, D) = weigh<T>(row, n * S, top);
      if (seen) seen->tops[r * seen->spans + span] = NOTHING;
      continue;
    }
    const Leave leave = leave_of(a, t, r, token);
    T* kept = reinterpret_cast<T*>(seen->weights) + r * seen->slots;
    float sums[2];
    switch (leave.way) {
#define WAY(which) \
  case Way::which: weigh_and_leave<T, Way::which>(row, top, leave, pos, places, n, S, kept, sums); break;
      WAY(as_it_is) WAY(tempered) WAY(gumbel) WAY(tempered_gumbel) WAY(gaussian)
#undef WAY
    }
    record_sum(record, D) = sums[0];
    seen->tops[r * seen->spans + span] = top * leave.by;
    seen->sums[r * seen->spans + span] = sums[1];
  }
  for (int j = 0; j < n; ++j) {
    const ptrdiff_t ahead = distance(values(j), j + 1 < n ? values(j + 1) : after);
    multiply<T>({weights + j * S, ROW, values(j), DEEP<T> * D, S, records, size, j > 0, ahead}, rows, D);
  }
  return true;
}

}  // namespace retain::RETAIN_ISA
