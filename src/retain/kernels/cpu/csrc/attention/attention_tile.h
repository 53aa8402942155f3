// Attention of one tile of queries over one block of its page table: scores, softmax, values.
//
// Each step takes the whole block before the next one starts. So the maximum is known before the first exponential, and
// nothing is rescaled within a block. Pages without a visible slot are skipped. This keeps windows, causal prefills and
// padded tables cheap.
#pragma once

#include "attention/attention_mass.h"
#include "attention/integer_pages.h"
#include "attention/key_transpose.h"
#include "attention/page_gemm.h"
#include "isa/simd.h"
#include "types.h"

namespace retain::RETAIN_ISA {

enum class Visibility { none, some, all };

// A query at p sees slot s iff 0 <= pos[s] <= p and p - pos[s] < window. The window test is written as
// pos[s] > p - window, because p - pos[s] would overflow for a hole and a large p.
INLINE int32_t last_before_window(int32_t p, int32_t window) {
  int64_t x = int64_t(p) - window;
  return x < INT32_MIN ? INT32_MIN : int32_t(x);
}
// The positions of a page that count; see PageOrder.
struct Positions {
  int32_t first = 0, last = INT32_MAX;

  INLINE bool are_all() const { return first == 0 && last == INT32_MAX; }
};
INLINE I is_visible(I pos, int32_t p, int32_t window, Positions counted) {
  return (pos >= counted.first) & (pos <= counted.last) & (pos <= p) & (pos > last_before_window(p, window));
}

// Classifies a page for queries at positions low .. high. `none` and `all` are exact; `some` needs a mask.
INLINE Visibility page_visibility(const int32_t* pos, int S, int32_t low, int32_t high, int32_t window) {
  using U = Lanes<WIDTH>::u;
  // The query at p sees begin(p) .. p: of all x - begin(p), unsigned, only theirs are at most p - begin(p).
  auto begin = [&](int32_t p) {
    const int32_t first = last_before_window(p, window) + 1;
    return first < 0 ? 0 : first;
  };
  const uint32_t begin_of_any = begin(low), begin_of_all = begin(high);
  U least = ~U{}, largest = {};
  for (int s = 0; s < S; s += WIDTH) {
    const U x = (U)load_ints(pos + s), y = x - begin_of_any, z = x - begin_of_all;
    least = y < least ? y : least, largest = z > largest ? z : largest;
  }
  if (high < 0 || !reduce_or<WIDTH>(least <= high - begin_of_any)) return Visibility::none;
  if (low < int32_t(begin_of_all) || reduce_or<WIDTH>(largest > low - begin_of_all)) return Visibility::some;
  return Visibility::all;
}

// The order in which the pages of a table are summed, and their blocks. A ring's table begins at another position for
// another chunk size or another prefix. So its pages are taken in the order of their positions, and its blocks begin at
// multiples of a block's positions: then the order of sums depends on positions only.
//
// Where several tokens are written at once, the newest page of a ring may hold tokens of the lap before, too, which the
// first of the queries see. Then that page comes twice: as the oldest one with those tokens, as the newest with others.
struct PageOrder {
  int n, per_block, oldest = 0, lead = 0;  // index of the first page in the table; how late it is in its block
  int table_pages;                         // n, or one less where the newest page comes twice
  int32_t lap_begin = 0;                   // position of the first token of the newest page that is of the newest lap

  INLINE PageOrder(const AttentionArgs& args, const QueryTile& tile, const int32_t* table)
      : n(args.tables.num_pages(tile.b, tile.g)), per_block(pages_per_block(args.kv)), table_pages(n) {
    if (!args.tables.has_window(tile.b)) return;
    const int S = args.kv.S;
    int32_t lowest = INT32_MAX, highest = -1;
    int newest = 0;
    for (int i = 0; i < n; ++i) {
      const int32_t position = newest_position(args.kv.pos + int64_t(table[i]) * S, S);
      if (position >= 0 && position < lowest) lowest = position, oldest = i;
      if (position > highest) highest = position, newest = i;
    }
    if (args.tables.num_fresh(tile.b) > 1 && highest >= 0) {
      const int32_t begin = highest / S * S;
      const int32_t before = newest_position(args.kv.pos + int64_t(table[newest]) * S, S, begin);
      if (before >= 0) lowest = before, oldest = newest, lap_begin = begin, ++n;
    }
    if (lowest < INT32_MAX) lead = lowest / S % per_block;
  }
  // The newest one below `end`: a page may begin with holes, or with tokens that are newer than its others.
  static INLINE int32_t newest_position(const int32_t* pos, int S, int32_t end = INT32_MAX) {
    I newest = splat(-1);
    for (int s = 0; s < S; s += WIDTH) {
      const I x = load_ints(pos + s);
      newest = (x > newest) & (x < end) ? x : newest;
    }
    int32_t lanes[WIDTH], result = -1;
    memcpy(lanes, &newest, sizeof newest);
    for (int32_t x : lanes) result = x > result ? x : result;
    return result;
  }
  // Numbers of pages in this order.
  INLINE int begin(int block) const { return block * per_block > lead ? min(block * per_block - lead, n) : 0; }
  INLINE int end(int block) const { return begin(block + 1); }
  INLINE int in_table(int i) const {
    i += oldest;
    return i < table_pages ? i : i - table_pages;
  }
  INLINE Positions counted(int i) const {
    if (n == table_pages || (i > 0 && i < n - 1)) return {};
    return i == 0 ? Positions{0, lap_begin - 1} : Positions{lap_begin, INT32_MAX};
  }
  static INLINE int min(int a, int b) { return a < b ? a : b; }
};

// Copies the queries of a tile, scaled and rounded to the pool's dtype, into `memory`.
template <class Q, class T>
void gather_queries(const AttentionArgs& args, const QueryTile& tile, float* memory, Queries<T>& queries) {
  Multiplier<T>* rows = reinterpret_cast<Multiplier<T>*>(memory);
  queries.rows = rows;
  const int D = args.kv.k_dim, first = args.tables.query_start_loc[tile.b];
  for (int i = tile.begin; i < tile.end; ++i, rows += D) {
    const Q* q = static_cast<const Q*>(args.q.data) + (first + i / args.R) * args.q.token_stride +
                 (tile.g * args.R + i % args.R) * args.q.head_stride;
    for (int d = 0; d < D; ++d) rows[d] = to_multiplier<T>(args.params.scale * to_float(q[d]));
  }
}

// Bounds scores: softcap * tanh(x / softcap).
INLINE void cap_scores(float softcap, int rows, int n, float* x) {
  const float factor = 1 / softcap;
  for (int r = 0; r < rows; ++r, x += SCORE_STRIDE)
    for (int s = 0; s < n; s += WIDTH) store<WIDTH>(x + s, softcap * tanh(factor * load<WIDTH>(x + s)));
}

// Adds the ALiBi bias to the scores of one page and masks hidden slots. `x` points at the first row's scores.
INLINE void apply_bias_and_mask(const AttentionArgs& args, const QueryTile& tile, const int32_t* pos, bool mask,
                                Positions counted, float* x) {
  for (int i = tile.begin; i < tile.end; ++i, x += SCORE_STRIDE) {
    const int32_t p = args.q_pos[args.tables.query_start_loc[tile.b] + i / args.R];
    for (int s = 0; s < args.kv.S; s += WIDTH) {
      I slot_pos = load_ints(pos + s);
      F y = load<WIDTH>(x + s);
      if (args.params.alibi_slopes) y += args.params.alibi_slopes[tile.g * args.R + i % args.R] * __builtin_convertvector(slot_pos - p, F);
      if (mask) y = is_visible(slot_pos, p, args.tables.window_of(tile.b), counted) ? y : splat(NEG_INF);
      store<WIDTH>(x + s, y);
    }
  }
}

// For pages of a type: the type that softmax weights are rounded to, the one they are stored in, and that of queries.
template <class Page>
struct PageTraits {
  using Weight = Page;
  using StoredWeight = Multiplier<Page>;
  using Query = Page;
};
template <>
struct PageTraits<uint8_t> {
  using Weight = bf16;
  using StoredWeight = bf16;
  using Query = uint8_t;
};
template <>
struct PageTraits<K8V4> : PageTraits<uint8_t> {};
template <>
struct PageTraits<Nibbles> : PageTraits<uint8_t> {};
template <class Page>
using Weight = typename PageTraits<Page>::Weight;
template <class Page>
using QueriesOf = Queries<typename PageTraits<Page>::Query>;

template <class Page>
INLINE QueriesOf<Page>& queries_in(float* scratch) {
  static_assert(sizeof(QueriesOf<Page>) <= sizeof(float) * (SCRATCH_FLOATS - QUERY_INFO_OFFSET), "scratch has room");
  return *reinterpret_cast<QueriesOf<Page>*>(scratch + QUERY_INFO_OFFSET);
}

template <class Page>
void gather_queries_impl(const AttentionArgs& args, const QueryTile& tile, float* scratch) {
  if (args.q.dtype == DType::float32)
    gather_queries<float>(args, tile, scratch + QUERY_OFFSET, queries_in<Page>(scratch));
  else
    gather_queries<bf16>(args, tile, scratch + QUERY_OFFSET, queries_in<Page>(scratch));
}

// The mass weights of one row. Page j of the block writes to out[page_index[j] * S].
template <class T>
struct MassOutput {
  ScoreTransform transform;
  const float* noise;
  const int* page_index;
  T* out;
};

// Turns row r's scores into weights e^(score - maximum) of dtype T, in place: a weight is never longer than its score.
// Writes the mass weights too, unless KIND is none. `sums` receives the sum of weights and the sum of mass weights.
template <class T, ScoreKind KIND, class Page>
INLINE void softmax_row(float* x, int n, int S, float maximum, Prefetcher<Page>& prefetcher, int lines,
                        const MassOutput<T>* mass, float (&sums)[2]) {
  const F shift = splat(maximum == NEG_INF ? 0.0f : maximum);  // if no slot is visible, every weight is e^-inf = 0
  F total = {}, mass_total = {};
  using Stored = typename PageTraits<Page>::StoredWeight;
  Stored* weights = reinterpret_cast<Stored*>(x);
  for (int j = 0; j < n; ++j)
    for (int s = 0; s < S; s += WIDTH) {
      prefetcher.prefetch(lines);
      const F d = load<WIDTH>(x + j * S + s) - shift, w = exp<T>(d);
      total += w;
      if constexpr (std::is_same_v<Stored, Multiplier<T>>)
        store_multipliers<T>(weights + j * S + s, w);
      else
        store_as(weights + j * S + s, w);
      if constexpr (KIND != ScoreKind::none) {
        const F y = mass_weight<T, KIND>(mass->transform, d, w, mass->noise + j * S + s);
        mass_total += y;
        store_as(mass->out + int64_t(mass->page_index[j]) * S + s, y);
      }
    }
  sums[0] = reduce_sum<WIDTH>(total);
  sums[1] = reduce_sum<WIDTH>(mass_total);
}

template <class Page>
bool attend_tile_impl(const AttentionArgs& args, const QueryTile& tile, int block, float* scratch, float* partials,
                      const MassBuffers* mass) {
  using T = Weight<Page>;
  const int S = args.kv.S, D = args.kv.v_dim, rows = tile.num_rows();
  const int32_t* p = args.q_pos + args.tables.query_start_loc[tile.b];
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (int i = tile.begin / args.R; i <= (tile.end - 1) / args.R; ++i) {
    low = p[i] < low ? p[i] : low;
    high = p[i] > high ? p[i] : high;
  }

  const int32_t* table = args.tables.page_table(tile.b, tile.g);
  const PageOrder order(args, tile, table);
  const int first = order.begin(block), last = order.end(block);
  for (int i = first; i < order.end(block + 1); ++i)  // positions of this block and of the next
    for (int s = 0; s < S; s += 16) __builtin_prefetch(args.kv.pos + int64_t(table[order.in_table(i)]) * S + s);
  // The n pages with a visible slot.
  int64_t page[MAX_BLOCK_PAGES];
  int page_index[MAX_BLOCK_PAGES];  // in the page table
  const int32_t* pos[MAX_BLOCK_PAGES];
  bool mask[MAX_BLOCK_PAGES];
  Positions counted[MAX_BLOCK_PAGES];
  int n = 0;
  for (int k = first; k < last; ++k) {
    const int i = order.in_table(k);
    Visibility visible =
        page_visibility(args.kv.pos + int64_t(table[i]) * S, S, low, high, args.tables.window_of(tile.b));
    page[n] = table[i];
    page_index[n] = i;
    pos[n] = args.kv.pos + int64_t(table[i]) * S;
    if (mass)
      for (int s = 0; s < args.kv.mass_columns * S; s += 16) __builtin_prefetch(args.kv.mass_page(table[i]) + s, 1);
    counted[n] = order.counted(k);
    mask[n] = visible == Visibility::some || !counted[n].are_all();
    n += visible != Visibility::none;
    if (visible == Visibility::none && mass)
      for (int r = 0; r < rows; ++r)
        memset(mass->weights + (r * mass->num_slots + int64_t(i) * S) * sizeof(T), 0, S * sizeof(T));
  }
  if (n == 0) return false;

  float* x = scratch;  // [rows, SCORE_STRIDE]
  const QueriesOf<Page>& q = queries_in<Page>(scratch);
  const Pool& kv = args.kv;
  VisiblePages<Page> pages = {n, S, kv.k_dim, D, kv.key_bytes(), kv.value_bytes(), {}, {}, {}};
  for (int j = 0; j < n; ++j) {
    pages.keys[j] = static_cast<const Page*>(keys_by_dimension(kv, page[j], args.transposed_keys, j));
    pages.values[j] = static_cast<const Page*>(args.kv.value_page(page[j]));
    const int next = order.in_table(last + j < order.n ? last + j : order.n - 1);
    pages.next_keys[j] = static_cast<const Page*>(args.kv.key_page(table[next]));
  }
  Prefetcher<Page> prefetcher(n, pages.values, pages.value_bytes, pages.next_keys, pages.key_bytes);
  score_pages(pages, q, rows, x, prefetcher);
  if (args.params.softcap) cap_scores(args.params.softcap, rows, n * S, x);
  for (int j = 0; j < n; ++j)
    if (args.params.alibi_slopes || mask[j]) apply_bias_and_mask(args, tile, args.kv.pos + page[j] * S, mask[j], counted[j], x + j * S);
  const int size = partial_size(D), vectors = rows * S / WIDTH;
  // To prefetch for each vector of weights. Rounding the weights of quantized slots prefetches too.
  const int64_t bytes = kv.is_quantized() ? pages.value_bytes : pages.value_bytes + pages.key_bytes;
  const int lines = prefetcher.lines_per_step(bytes, vectors);
  alignas(64) float noise[SCORE_STRIDE];
  ScoreTransform transform = {ScoreKind::none, 1};
  int drawn = -2;
  float drawn_temperature = 0;  // as its inverse; 0: no noise is drawn yet
  for (int r = 0, scored_token = -1; r < rows; ++r) {
    float *partial = partials + r * size, *row = x + r * SCORE_STRIDE;
    F maxima = splat(NEG_INF);
    for (int s = 0; s < n * S; s += WIDTH) maxima = max(maxima, load<WIDTH>(row + s));
    const float maximum = partial_max(partial, D) = reduce_max<WIDTH>(maxima);
    const int token = args.tables.query_start_loc[tile.b] + (tile.begin + r) / args.R;
    const int entry = mass ? r * mass->num_blocks + block : 0;
    if (mass && token != scored_token) {
      scored_token = token, transform = score_transform(args, tile, token);
      const int draw = args.scoring.noise_draw(tile.b, args.q_pos[token]);
      const bool is_drawn = draw == drawn && transform.inv_temperature == drawn_temperature;
      if (transform.kind >= ScoreKind::noised && !is_drawn) {
        drawn = draw, drawn_temperature = transform.inv_temperature;
        draw_noise<T>(args, tile, token, transform.inv_temperature, n, pos, noise);
      }
    }
    const MassOutput<T> mass_output = {transform, noise, page_index,
                                       mass ? reinterpret_cast<T*>(mass->weights) + r * mass->num_slots : nullptr};
    float sums[2];
    switch (transform.kind) {
#define CASE(kind)                                                                              \
  case ScoreKind::kind:                                                                         \
    softmax_row<T, ScoreKind::kind>(row, n, S, maximum, prefetcher, lines, &mass_output, sums); \
    break;
      CASE(none) CASE(unchanged) CASE(tempered) CASE(noised) CASE(tempered_noised)
#undef CASE
    }
    partial_sum(partial, D) = sums[0];
    if (!mass) continue;
    mass->maxima[entry] = transform.kind == ScoreKind::none ? NEG_INF : maximum * transform.inv_temperature;
    mass->sums[entry] = sums[1];
  }
  sum_values(pages, x, rows, partials, prefetcher);
  prefetcher.prefetch_rest();
  return true;
}

// Merges the partial results of the next block into those of the blocks before it.
INLINE void merge_partials_impl(float* total, const float* next, int rows, int D) {
  const int size = partial_size(D);
  for (int r = 0; r < rows; ++r, total += size, next += size) {
    if (partial_max(next, D) == NEG_INF) continue;
    const float top = partial_max(total, D) > partial_max(next, D) ? partial_max(total, D) : partial_max(next, D);
    const float total_factor = __builtin_expf(partial_max(total, D) - top);
    const float next_factor = __builtin_expf(partial_max(next, D) - top);
    const float sum = partial_sum(total, D) * total_factor + partial_sum(next, D) * next_factor;
    for (int d = 0; d < D; d += WIDTH)  // the last vector may reach into the maximum and the sum
      store<WIDTH>(total + d, load<WIDTH>(total + d) * total_factor + load<WIDTH>(next + d) * next_factor);
    partial_max(total, D) = top, partial_sum(total, D) = sum;
  }
}

}  // namespace retain::RETAIN_ISA
