// The rows of a tile look at one span of their table: scores, softmax, values.
//
// Three passes over the span's slots, so that the maximum is known before the first exponential and nothing is
// ever rescaled inside a span. Pages in which nobody sees anything are not touched at all; that alone makes a
// window, a causal prefill and a padded table cheap.
#pragma once

#include "types.h"
#include "attention_mass.h"
#include "gemm.h"
#include "simd.h"

namespace retain::RETAIN_ISA {

constexpr int MAX_PAGES = SPAN / 16;  // of the smallest page, in a span
constexpr int FEW_ROWS = 12;          // that do not hide how long memory takes

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

// Pages that will be wanted soon, into the second level: while scores are weighed the memory would have nothing to do.
struct Soon {
  const char* page[MAX_PAGES];
  int lines;  // for each vector of scores; none where many rows share the pages

  INLINE void ask(int j, int vector) const {
    for (int i = 0; i < lines; ++i) __builtin_prefetch(page[j] + 64 * (vector * lines + i), 0, 2);
  }
};

// What an observed row leaves, and where: on page j at to[places[j] * S].
template <class T>
struct Left {
  Leave leave;
  const float* noise;
  const int* places;
  T* to;
};

// Scores of row r to weights of the pool's type, in place: a weight is never longer than its score. `top` is their
// maximum. `sums` are of the weights, and of what is left.
template <class T, Way WAY>
INLINE void weigh(float* x, int r, int n, int S, float top, const Soon& soon, const Left<T>* left, float (&sums)[2]) {
  const F from = splat(top == NOTHING ? 0.0f : top);  // a row that sees nothing: every weight is e^-inf = 0
  F total = {}, all = {};
  T* to = reinterpret_cast<T*>(x);
  for (int j = 0; j < n; ++j)
    for (int s = 0; s < S; s += WIDTH) {
      soon.ask(j, (r * S + s) / WIDTH);
      const F d = load<WIDTH>(x + j * S + s) - from, w = exp<T>(d);
      total += w;
      store_as(to + j * S + s, w);
      if constexpr (WAY != Way::nothing) {
        const F y = leave_on<T, WAY>(left->leave, d, w, left->noise + j * S + s);
        all += y;
        store_as(left->to + int64_t(left->places[j]) * S + s, y);
      }
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
  auto next_keys = [&](int j) { return a.kv.key_page(table[last + j < owned ? last + j : owned - 1]); };
  auto distance = [](const void* from, const void* to) { return intptr_t(to) - intptr_t(from); };

  for (int j = 0; j < n; ++j) {
    const ptrdiff_t ahead = distance(keys(j), values(j));
    multiply<T>({q, D, keys(j), DEEP<T> * S, D, x + j * S, SCORES, false, ahead}, rows, S);
    if (a.slopes || mask[j]) adjust(a, t, a.kv.pos + page[j] * S, mask[j], x + j * S);
  }
  const int size = record_size(D), vectors = rows * S / WIDTH;
  Soon soon = {{}, rows > FEW_ROWS ? 0 : S * D * int(sizeof(T)) / 64 / vectors};
  for (int j = 0; j < n; ++j) soon.page[j] = static_cast<const char*>(next_keys(j));
  alignas(64) float noise[SCORES];
  Leave leave = {Way::nothing, 1};
  for (int r = 0, drawn = -1; r < rows; ++r) {
    float *record = records + r * size, *row = x + r * SCORES;
    F most = splat(NOTHING);
    for (int s = 0; s < n * S; s += WIDTH) most = max(most, load<WIDTH>(row + s));
    const float top = record_max(record, D) = highest<WIDTH>(most);
    const int token = a.tables.starts[t.b] + (t.begin + r) / a.R, at = seen ? r * seen->spans + span : 0;
    if (seen && token != drawn) {
      drawn = token, leave = leave_of(a, t, token);
      if (leave.way >= Way::noised) draw<T>(a, t, token, leave.by, n, pos, noise);
    }
    const Left<T> left = {leave, noise, places, seen ? reinterpret_cast<T*>(seen->weights) + r * seen->slots : nullptr};
    float sums[2];
    switch (leave.way) {
#define WAY(which) \
  case Way::which: weigh<T, Way::which>(row, r, n, S, top, soon, &left, sums); break;
      WAY(nothing) WAY(as_it_is) WAY(tempered) WAY(noised) WAY(tempered_noised)
#undef WAY
    }
    record_sum(record, D) = sums[0];
    if (!seen) continue;
    seen->tops[at] = leave.way == Way::nothing ? NOTHING : top * leave.by;
    seen->sums[at] = sums[1];
  }
  for (int j = 0; j < n; ++j) {
    const ptrdiff_t ahead = distance(values(j), next_keys(j));
    multiply<T>({weights + j * S, ROW, values(j), DEEP<T> * D, S, records, size, j > 0, ahead}, rows, D);
  }
  return true;
}

}  // namespace retain::RETAIN_ISA
