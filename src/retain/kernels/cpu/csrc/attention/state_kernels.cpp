// Short convolutions and linear attention for one instruction set (kernels/linear_attention.py has the formulas). CMake
// compiles this file once for each, see isa_kernels.cpp.
//
// Every number is summed in one order: over the rows of a state, then over the tokens since the last page end. Blocks
// of tokens share loads only. So a token's bits depend neither on where steps cut its text, nor on its company.
#include <algorithm>

#include "attention/layer_states.h"
#include "isa/simd.h"

namespace retain::RETAIN_ISA {

constexpr int COLUMNS = FEW_REGISTERS ? 4 : 8;  // vectors of a row whose sums are in registers

// Some vectors of a row: their lanes, and their number.
template <int W_, int N_>
struct Vectors {
  static constexpr int W = W_, N = N_;
};

// Calls f(column, Vectors) for blocks of n columns. Sizes are multiples of 8: what 16 lanes leave is a vector of 8.
template <int MAX, class Function>
INLINE void for_columns(int n, Function f) {
  int i = 0;
  for (; i + MAX * WIDTH <= n; i += MAX * WIDTH) f(i, Vectors<WIDTH, MAX>());
  for (; i + WIDTH <= n; i += WIDTH) f(i, Vectors<WIDTH, 1>());
  if constexpr (WIDTH > 8)
    if (i < n) f(i, Vectors<8, 1>());
}

template <int W>
INLINE typename Lanes<W>::f broadcast(float x) {
  return x - typename Lanes<W>::f{};
}

// ---- convolutions ---------------------------------------------------------------------------------------------------

// A block of channels: `first` of all, and `offset` in K or in V of a head.
struct ChannelBlock {
  int head, first, offset, size;
  bool is_key;
};

INLINE ChannelBlock channel_block(const ConvolutionArgs& args, int block) {
  const int k_dim = args.cache.kv.k_dim, v_dim = args.cache.kv.v_dim;
  const int keys = args.blocks_of_key(), per_head = keys + args.blocks_of_value();
  const int head = block / per_head, i = block % per_head;
  const bool is_key = i < keys;
  const int offset = (is_key ? i : i - keys) * CHANNEL_BLOCK, left = (is_key ? k_dim : v_dim) - offset;
  const int first = head * (k_dim + v_dim) + (is_key ? 0 : k_dim) + offset;
  return {head, first, offset, left < CHANNEL_BLOCK ? left : CHANNEL_BLOCK, is_key};
}

INLINE float* input_slot(const SlotCache& cache, const ChannelBlock& c, int64_t slot) {
  return (c.is_key ? cache.key(slot) : cache.value(slot)) + c.offset;
}

// Computes rows `begin` .. `end` - 1 of one request, the last first: y may be x. `before` has W - 1 earlier inputs.
static void convolve_rows(const ConvolutionArgs& args, const ChannelBlock& c, const float* before, int begin, int end) {
  const Convolution& p = args.convolution;
  const int W = p.window;
  for (int t = end - 1; t >= begin; --t) {
    const float* const x = args.x + int64_t(t) * p.channels + c.first;
    float* const y = args.y + int64_t(t) * p.channels + c.first;
    if (const int32_t slot = args.cache.slot(c.head, t); args.cache.is_written(slot)) {
      memcpy(input_slot(args.cache, c, slot), x, c.size * sizeof(float));
      if (c.is_key && c.offset == 0) args.cache.set_position(slot, args.pos[t]);
    }
    for_columns<4>(c.size, [&](int column, auto vectors) {
      constexpr int L = decltype(vectors)::W, N = decltype(vectors)::N;
      typename Lanes<L>::f sum[N];
      for (int n = 0; n < N; ++n)
        sum[n] = p.bias ? load<L>(p.bias + c.first + column + n * L) : typename Lanes<L>::f{};
      for (int i = 0; i < W; ++i) {
        const int back = W - 1 - i;
        const float* const from =
            (t - back >= begin ? x - int64_t(back) * p.channels : before + (t - begin + i) * CHANNEL_BLOCK) + column;
        const float* const weight = p.weight + int64_t(i) * p.channels + c.first + column;
        for (int n = 0; n < N; ++n) sum[n] += load<L>(weight + n * L) * load<L>(from + n * L);
      }
      for (int n = 0; n < N; ++n) store<L>(y + column + n * L, sum[n]);
    });
  }
}

void convolve(const ConvolutionArgs& args, int block) {
  const PageTables& tables = args.cache.tables;
  const ChannelBlock c = channel_block(args, block);
  const int num_before = args.convolution.window - 1;
  float before[(MAX_WINDOW - 1) * CHANNEL_BLOCK];
  for (int b = 0; b < tables.B; ++b) {
    for (int i = 0; i < num_before; ++i) {
      float* const to = before + i * CHANNEL_BLOCK;
      const int32_t found = args.found[b * num_before + i];
      if (found < 0) {
        memset(to, 0, c.size * sizeof(float));
      } else {
        const int64_t page = tables.page_table(b, c.head)[found / args.cache.kv.S];
        const int64_t slot = page * args.cache.kv.S + found % args.cache.kv.S;
        memcpy(to, input_slot(args.cache, c, slot), c.size * sizeof(float));
      }
    }
    convolve_rows(args, c, before, tables.query_start_loc[b], tables.query_start_loc[b + 1]);
  }
}

// ---- products with a state ------------------------------------------------------------------------------------------

// How many rows of a state a product of one token asks for in advance. It is bound by memory, and a state lies in
// pieces of some KB, which a processor's own prefetching does not cross.
constexpr int PREFETCH_ROWS = 8;

// Sets y[m] = sum_d x[m][d] * rows[d] for M vectors x of n numbers; rows of y and of the state have `width` numbers.
template <int M, int MAX>
INLINE void multiply_state(const float* const* rows, int n, int width, const float* const* x, float* y) {
  for_columns<MAX>(width, [&](int column, auto vectors) {
    constexpr int L = decltype(vectors)::W, N = decltype(vectors)::N;
    typename Lanes<L>::f sum[M][N] = {};
    for (int d = 0; d < n; ++d)
      for (int i = 0; i < N; ++i) {
        const auto row = load<L>(rows[d] + column + i * L);
        if (M <= 2) __builtin_prefetch(rows[d + PREFETCH_ROWS] + column + i * L, 0, 2);
        for (int m = 0; m < M; ++m) sum[m][i] += broadcast<L>(x[m][d]) * row;
      }
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < N; ++i) store<L>(y + m * width + column + i * L, sum[m][i]);
  });
}

static void multiply_state(const float* const* rows, int n, int width, const float* const* x, int M, float* y) {
  constexpr int MANY = FEW_REGISTERS ? 4 : 6, FEW_COLUMNS = FEW_REGISTERS ? 2 : 4;
  for (; M >= MANY; M -= MANY, x += MANY, y += MANY * width)
    multiply_state<MANY, FEW_COLUMNS>(rows, n, width, x, y);
  for (; M >= 2; M -= 2, x += 2, y += 2 * width) multiply_state<2, COLUMNS>(rows, n, width, x, y);
  if (M > 0) multiply_state<1, COLUMNS>(rows, n, width, x, y);
}

// ---- a value head ---------------------------------------------------------------------------------------------------

// The slots of a head since the last page end: keys, what they add to the state, and the sums of their log decays.
struct PageTokens {
  const float* k[MAX_PAGE_SIZE];
  const float* u[MAX_PAGE_SIZE];
  alignas(64) float decay[MAX_PAGE_SIZE];
  int size;
};

// One value head of a request, between two of its tokens.
struct ValueHead {
  INLINE ValueHead(const LinearAttentionArgs& args, int h, float* scratch)
      : args(args), h(h), products(scratch), u(products + 2 * PRODUCT_TOKENS * args.params.v_dim),
        state(u + int64_t(args.fold()) * args.params.v_dim) {}

  const LinearAttentionArgs& args;
  const int h;
  float *const products, *const u, *const state;  // scratch: [2 PRODUCT_TOKENS, v_dim], [S, v_dim], [k_dim, v_dim]
  const float* rows[MAX_K_DIM + PREFETCH_ROWS] = {};  // of the state at the last page end
  bool is_zero;                  // that state, which has no rows then
  PageTokens page;

  INLINE const float* query(int t) const { return qkv(t) + h / heads_per_key() * args.params.k_dim; }
  INLINE const float* key(int t) const { return query(t) + args.params.num_key_heads * args.params.k_dim; }
  INLINE const float* value(int t) const {
    return qkv(t) + 2 * args.params.num_key_heads * args.params.k_dim + h * args.params.v_dim;
  }
  INLINE float* out(int t) const {
    return args.out + (int64_t(t) * args.params.num_value_heads + h) * args.params.v_dim;
  }

  INLINE const float* qkv(int t) const { return args.qkv + int64_t(t) * args.params.qkv_width(); }
  INLINE int heads_per_key() const { return args.params.num_value_heads / args.params.num_key_heads; }
};

// Finds the rows of the state behind the first `end` tokens. Returns false if the tables lack it.
static bool find_state(ValueHead& head, int b, int32_t end) {
  const SlotCache& states = head.args.states;
  const int S = states.kv.S, parts = head.args.num_parts(), num_rows = head.args.params.k_dim;
  head.is_zero = end == 0;
  for (int part = 0; part < parts && end > 0; ++part) {
    const int g = head.h * parts + part, n = states.tables.num_pages(b, g);
    const int32_t* const pages = states.tables.page_table(b, g);
    int i = 0;
    while (i < n && states.kv.pos[int64_t(pages[i]) * S + S - 1] != end - 1) ++i;
    if (i == n) return false;
    const int64_t first_slot = int64_t(pages[i]) * S;
    for (int r = 0; r < 2 * S && 2 * S * part + r < num_rows; ++r)
      head.rows[2 * S * part + r] = r < S ? states.key(first_slot + r) : states.value(first_slot + r - S);
  }
  return true;
}

// Finds the slots of positions `base` .. `position` - 1. Returns false if the tables lack one.
static bool find_tokens(ValueHead& head, int b, int32_t base, int32_t position) {
  const SlotCache& tokens = head.args.tokens;
  const int S = tokens.kv.S, size = position - base, n = tokens.tables.num_pages(b, head.h);
  const int32_t* const pages = tokens.tables.page_table(b, head.h);
  PageTokens& page = head.page;
  page.size = size;
  for (int j = 0; j < size; ++j) page.k[j] = nullptr;
  int found = 0;
  for (int i = 0; i < n && found < size; ++i)
    for (int place = 0; place < S; ++place) {
      const int64_t slot = int64_t(pages[i]) * S + place;
      const int32_t j = tokens.kv.pos[slot] - base;
      if (j < 0 || j >= size || page.k[j]) continue;
      page.k[j] = tokens.key(slot), page.u[j] = tokens.value(slot);
      page.decay[j] = page.k[j][head.args.params.k_dim];
      ++found;
    }
  return found == size;
}

// Sets kk = a . k and kq = a . q, of n numbers.
INLINE void dot(const float* a, const float* k, const float* q, int n, float& kk, float& kq) {
  F sum_k = {}, sum_q = {};
  int i = 0;
  for (; i + WIDTH <= n; i += WIDTH) {
    const F x = load<WIDTH>(a + i);
    sum_k += x * load<WIDTH>(k + i);
    sum_q += x * load<WIDTH>(q + i);
  }
  kk = reduce_sum<WIDTH>(sum_k), kq = reduce_sum<WIDTH>(sum_q);
  if constexpr (WIDTH > 8) {
    if (i == n) return;
    const Lanes<8>::f x = load<8>(a + i);
    kk += reduce_sum<8>(x * load<8>(k + i));
    kq += reduce_sum<8>(x * load<8>(q + i));
  }
}

// Sets weight[j] = e^(decay - L_j) for the tokens of a page.
INLINE void decay_weights(const PageTokens& page, float decay, float* weight) {
  for (int j = 0; j < page.size; j += WIDTH) store<WIDTH>(weight + j, exp<float>(decay - load<WIDTH>(page.decay + j)));
}

// Sets the length of a token's step, and the factor of what it adds to the state.
template <UpdateRule RULE>
INLINE void read_gates(const LinearAttention& p, const float* gates, int h, float& step, float& factor) {
  const float a = gates[h] + p.time_bias[h];
  step = a > 20 ? a : __builtin_log1pf(__builtin_expf(a));
  if constexpr (RULE == UpdateRule::mamba2) {
    step = step < p.min_step ? p.min_step : step > p.max_step ? p.max_step : step;
    factor = step;
  } else {
    factor = 1 / (1 + __builtin_expf(-gates[p.num_value_heads + h]));
  }
}

// Computes the output of token t, and what it adds to the state, from its products with the state. Adds it to the page.
// Mamba-2 has no product with k.
template <UpdateRule RULE>
static void attend_token(ValueHead& head, int t, const float* product_k, const float* product_q) {
  constexpr bool CORRECTS = RULE == UpdateRule::gated_delta;
  const LinearAttention& p = head.args.params;
  PageTokens& page = head.page;
  float step, factor;
  read_gates<RULE>(p, head.args.gates + int64_t(t) * p.gates_width(), head.h, step, factor);
  const float skip = CORRECTS ? 0 : p.skip[head.h];
  const int j_end = page.size;
  const float before = j_end ? page.decay[j_end - 1] : 0;
  const float decay = before + p.decay[head.h] * step, e = __builtin_expf(decay);

  alignas(64) float to_u[MAX_PAGE_SIZE + WIDTH], to_o[MAX_PAGE_SIZE + WIDTH];
  const float *const k = head.key(t), *const q = head.query(t), *const v = head.value(t);
  decay_weights(page, decay, to_u);
  for (int j = 0; j < j_end; ++j) {
    float kk, kq;
    dot(page.k[j], k, q, p.k_dim, kk, kq);
    to_o[j] = to_u[j] * kq;
    if constexpr (CORRECTS) to_u[j] *= kk;
  }
  float own, unused;
  dot(k, q, q, p.k_dim, own, unused);

  float* const u = head.u + int64_t(j_end) * p.v_dim;
  float* const out = head.out(t);
  for_columns<COLUMNS>(p.v_dim, [&](int column, auto vectors) {
    constexpr int L = decltype(vectors)::W, N = decltype(vectors)::N;
    typename Lanes<L>::f x[N], o[N];
    for (int i = 0; i < N; ++i) {
      x[i] = load<L>(v + column + i * L);
      if constexpr (CORRECTS) x[i] -= broadcast<L>(e) * load<L>(product_k + column + i * L);
      o[i] = broadcast<L>(e) * load<L>(product_q + column + i * L);
    }
    for (int j = 0; j < j_end; ++j)
      for (int i = 0; i < N; ++i) {
        const auto y = load<L>(page.u[j] + column + i * L);
        if constexpr (CORRECTS) x[i] -= broadcast<L>(to_u[j]) * y;
        o[i] += broadcast<L>(to_o[j]) * y;
      }
    for (int i = 0; i < N; ++i) {
      if constexpr (!CORRECTS) o[i] += broadcast<L>(skip) * x[i];
      x[i] *= factor;
      store<L>(u + column + i * L, x[i]);
      store<L>(out + column + i * L, o[i] + broadcast<L>(own) * x[i]);
    }
  });
  page.k[j_end] = k, page.u[j_end] = u, page.decay[j_end] = decay;
  ++page.size;
}

// Sets R rows of a state to e * old + sum_j weight[j] * k_j * u_j; `to` may be `old`, which is null for a zero state.
template <int R>
INLINE void fold_rows(const PageTokens& page, const float* weight, float e, int d, const float* const* old, int width,
                      float* const* to) {
  float factors[R * MAX_PAGE_SIZE];
  for (int j = 0; j < page.size; ++j)
    for (int r = 0; r < R; ++r) factors[j * R + r] = weight[j] * page.k[j][d + r];
  for_columns<COLUMNS / 2>(width, [&](int column, auto vectors) {
    constexpr int L = decltype(vectors)::W, N = decltype(vectors)::N;
    typename Lanes<L>::f sum[R][N];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < N; ++i)
        sum[r][i] = old ? broadcast<L>(e) * load<L>(old[r] + column + i * L) : typename Lanes<L>::f{};
    for (int j = 0; j < page.size; ++j)
      for (int i = 0; i < N; ++i) {
        const auto y = load<L>(page.u[j] + column + i * L);
        for (int r = 0; r < R; ++r) sum[r][i] += broadcast<L>(factors[j * R + r]) * y;
      }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < N; ++i) store<L>(to[r] + column + i * L, sum[r][i]);
  });
}

// Lets the tokens of the page become part of the state, which goes into the page of token t, or into scratch memory.
static void fold(ValueHead& head, int t) {
  const SlotCache& states = head.args.states;
  const int S = states.kv.S, parts = head.args.num_parts(), D = head.args.params.k_dim, V = head.args.params.v_dim;
  const PageTokens& page = head.page;
  const float decay = page.decay[page.size - 1];
  alignas(64) float weight[MAX_PAGE_SIZE + WIDTH];
  decay_weights(page, decay, weight);
  float* to[MAX_K_DIM];
  for (int d = 0; d < D; ++d) {
    const int r = d % (2 * S);
    const int32_t slot = states.slot(head.h * parts + d / (2 * S), t);
    const int64_t first_slot = slot / S * S;
    to[d] = !states.is_written(slot) ? head.state + int64_t(d) * V
            : r < S                  ? states.key(first_slot + r)
                                     : states.value(first_slot + r - S);
  }
  const float e = __builtin_expf(decay);
  for (int d = 0; d < D; d += 4)  // sizes are multiples of 8
    fold_rows<4>(page, weight, e, d, head.is_zero ? nullptr : head.rows + d, V, to + d);
  for (int d = 0; d < D; ++d) head.rows[d] = to[d];
  head.is_zero = false;
}

// Writes the slots of tokens begin .. end - 1, which are the last ones of the page.
static void write_slots(const ValueHead& head, int begin, int end) {
  const LinearAttentionArgs& args = head.args;
  const int D = args.params.k_dim, parts = args.num_parts();
  for (int t = begin; t < end; ++t) {
    const int j = head.page.size - (end - t);
    if (const int32_t slot = args.tokens.slot(head.h, t); args.tokens.is_written(slot)) {
      float* const k = args.tokens.key(slot);
      memcpy(k, head.page.k[j], D * sizeof(float));
      k[D] = head.page.decay[j];
      memset(k + D + 1, 0, (args.tokens.kv.k_dim - D - 1) * sizeof(float));
      memcpy(args.tokens.value(slot), head.page.u[j], args.params.v_dim * sizeof(float));
      args.tokens.set_position(slot, args.pos[t]);
    }
    for (int g = head.h * parts; g < (head.h + 1) * parts; ++g)
      if (const int32_t slot = args.states.slot(g, t); args.states.is_written(slot))
        args.states.set_position(slot, args.pos[t]);
  }
}

// Attends with tokens begin .. end - 1, all of one page.
template <UpdateRule RULE>
static void attend_page(ValueHead& head, int begin, int end) {
  const LinearAttention& p = head.args.params;
  constexpr int N = RULE == UpdateRule::gated_delta ? 2 : 1;  // products of a token with the state
  const float* x[2 * PRODUCT_TOKENS];
  for (int first = begin, last; first < end; first = last) {
    last = first + PRODUCT_TOKENS < end ? first + PRODUCT_TOKENS : end;
    for (int t = first; t < last; ++t) {
      if constexpr (N == 2) x[N * (t - first)] = head.key(t);
      x[N * (t - first) + N - 1] = head.query(t);
    }
    const int M = N * (last - first);
    if (head.is_zero) memset(head.products, 0, int64_t(M) * p.v_dim * sizeof(float));
    else multiply_state(head.rows, p.k_dim, p.v_dim, x, M, head.products);
    for (int t = first; t < last; ++t) {
      const float* const product = head.products + int64_t(N * (t - first)) * p.v_dim;
      attend_token<RULE>(head, t, product, product + (N - 1) * p.v_dim);
    }
  }
}

// Asks for the positions of a cache's pages, which say where the tokens and the states of some heads are.
static void prefetch_positions(const SlotCache& cache, int b, int first_head, int num_heads) {
  for (int g = first_head; g < first_head + num_heads; ++g) {
    const int32_t* const pages = cache.tables.page_table(b, g);
    for (int i = 0; i < cache.tables.num_pages(b, g); ++i)
      __builtin_prefetch(cache.kv.pos + int64_t(pages[i]) * cache.kv.S, 0, 3);
  }
}

// Asks for the positions that the next head, or the next request, looks at first.
static void prefetch_next(const LinearAttentionArgs& args, int b, int h) {
  if (++h == args.params.num_value_heads) h = 0, ++b;
  if (b == args.tokens.tables.B) return;
  prefetch_positions(args.states, b, h * args.num_parts(), args.num_parts());
  prefetch_positions(args.tokens, b, h, 1);
}

void attend_linearly(const LinearAttentionArgs& args, int b, int h, float* scratch) {
  const int32_t* const starts = args.tokens.tables.query_start_loc;
  const int begin = starts[b], end = starts[b + 1], S = args.fold();
  if (begin == end) return;
  prefetch_next(args, b, h);
  ValueHead head(args, h, scratch);
  const int32_t position = args.pos[begin], base = position / S * S;
  if (!find_state(head, b, base) || !find_tokens(head, b, base, position)) {
    for (int t = begin; t < end; ++t) std::fill_n(head.out(t), args.params.v_dim, 0.0f);
    return;
  }
  for (int t = begin, next; t < end; t = next) {
    const int left = S - args.pos[t] % S;  // tokens of the page
    next = t + left < end ? t + left : end;
    if (args.params.rule == UpdateRule::mamba2) attend_page<UpdateRule::mamba2>(head, t, next);
    else attend_page<UpdateRule::gated_delta>(head, t, next);
    if (next - t == left) fold(head, next - 1);
    write_slots(head, t, next);  // after the last read of what they overwrite
    if (next - t == left) head.page.size = 0;
  }
}

}  // namespace retain::RETAIN_ISA
