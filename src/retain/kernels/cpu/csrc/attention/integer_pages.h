// The two products of attention with pages of quantized slots.
//
// Queries, and weights times the scales of values, become integers of 8 bits. A query has one scale. Weights have a
// scale for every WEIGHT_GROUP slots of a page, because most of them are much smaller than the largest of a block. What
// that costs beside exact queries and weights is less than what rounding the slots costs (docs/log/quantised-slots.md).
// Sums of products are exact in 32 bits, so bits do not depend on the instructions that compute them.
//
//   keys    int8: u8 [D / 4][S][4], 128 too high; then bfloat16 scales [S]
//           4 bits: u8 [D / 8][S][4] of two numbers, 8 too high; then bfloat16 scales [D / group][S]
//   values  int8: u8 [S / 4][D][4], 128 too high; then bfloat16 scales [S]
//           4 bits: u8 [S / 4][D / 2][4] of two numbers, 8 too high; then bfloat16 scales [D / group][S]
#pragma once

#include <type_traits>

#include "gemm/integer_products.h"
#include "attention/page_gemm.h"

namespace retain::RETAIN_ISA {

template <>
inline constexpr int INTERLEAVE<uint8_t> = 4;

constexpr int WEIGHT_GROUP = 32;  // slots whose weights share a scale

struct K8V4 {  // the type of a page of 8-bit keys and 4-bit values
  uint8_t byte;
};
struct Nibbles {  // the type of a page of 4-bit keys and values
  uint8_t byte;
};
template <>
inline constexpr int PRODUCTS_PERCENT<uint8_t> = 65;
template <>
inline constexpr int PRODUCTS_PERCENT<K8V4> = 50;
template <>
inline constexpr int PRODUCTS_PERCENT<Nibbles> = 75;

// The scales that follow S slots of `width` bytes.
INLINE const bf16* slot_scales(const void* page, int S, int width) {
  return reinterpret_cast<const bf16*>(static_cast<const uint8_t*>(page) + S * width);
}

#define EACH(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < n; ++i)

template <>
struct Queries<uint8_t> {
  IntegerRows rows;
  float scale[MAX_TILE_ROWS];
  // Minus what slots hold too much, times the query: of all dimensions for 8 bits, of each group for 4 bits.
  int32_t excess[MAX_TILE_ROWS][MAX_K_DIM / 8];
};

// Computes scores [rows, SCORE_STRIDE].
template <class Page>
INLINE void score_integer_pages(const VisiblePages<Page>& p, const Queries<uint8_t>& q, int rows, float* scores,
                                Prefetcher<Page>& prefetcher) {
  constexpr int VALUE_BITS = std::is_same_v<Page, K8V4> ? 4 : 8;
  for (int j = 0; j < p.n; ++j) {
    const uint8_t* keys = reinterpret_cast<const uint8_t*>(p.keys[j]);
    const bf16* scales = slot_scales(p.keys[j], p.S, p.k_dim);
    for_blocks<MOST_ROWS, MOST_VECTORS>(rows, p.S, [&](int first, auto num_rows, int s, auto vectors) {
      constexpr int ROWS = decltype(num_rows)::value, VECTORS = decltype(vectors)::value;
      I sums[ROWS][VECTORS];
      EACH(r, ROWS) EACH(v, VECTORS) sums[r][v] = splat(q.excess[first + r][0]);
      const int8_t* queries = q.rows.data + first * q.rows.stride;
      add_products<VECTORS * WIDTH * VALUE_BITS / 128>(sums, queries, q.rows.stride, keys + 4 * s, p.k_dim, p.S,
                                                        prefetcher);
      float* to = scores + first * SCORE_STRIDE + j * p.S + s;
      EACH(v, VECTORS) {
        const F scale = load<WIDTH>(scales + s + v * WIDTH);
        EACH(r, ROWS) {
          const F product = __builtin_convertvector(sums[r][v], F) * q.scale[first + r] * scale;
          store<WIDTH>(to + r * SCORE_STRIDE + v * WIDTH, product);
        }
      }
    });
  }
}
INLINE void score_pages(const VisiblePages<uint8_t>& p, const Queries<uint8_t>& q, int rows, float* scores,
                        Prefetcher<uint8_t>& prefetcher) {
  score_integer_pages(p, q, rows, scores, prefetcher);
}
INLINE void score_pages(const VisiblePages<K8V4>& p, const Queries<uint8_t>& q, int rows, float* scores,
                        Prefetcher<K8V4>& prefetcher) {
  score_integer_pages(p, q, rows, scores, prefetcher);
}

// Each group of dimensions has scales of its own. Byte i of a group holds numbers i and i + half, which go with numbers
// i and i + half of the queries.
INLINE void score_pages(const VisiblePages<Nibbles>& p, const Queries<uint8_t>& q, int rows, float* scores,
                        Prefetcher<Nibbles>& prefetcher) {
  const int group = slot_group(p.k_dim), half = group / 2;
  for (int j = 0; j < p.n; ++j) {
    const uint8_t* keys = reinterpret_cast<const uint8_t*>(p.keys[j]);
    const bf16* scales = slot_scales(p.keys[j], p.S, p.k_dim / 2);
    auto block = [&](int first, auto num_rows, int s, auto vectors) {
      constexpr int ROWS = decltype(num_rows)::value, VECTORS = decltype(vectors)::value;
      float* to = scores + first * SCORE_STRIDE + j * p.S + s;
      F totals[ROWS][VECTORS] = {};
      for (int g = 0; g * group < p.k_dim; ++g) {
        I sums[ROWS][VECTORS];
        EACH(r, ROWS) EACH(v, VECTORS) sums[r][v] = splat(q.excess[first + r][g]);
        const int8_t* queries = q.rows.data + first * q.rows.stride + g * group;
        add_nibble_products<4>(sums, sums, queries, q.rows.stride, half,
                                                  keys + g * half * p.S + 4 * s, half, p.S, prefetcher);
        EACH(v, VECTORS) {
          const F scale = load<WIDTH>(scales + g * p.S + s + v * WIDTH);
          EACH(r, ROWS) totals[r][v] += __builtin_convertvector(sums[r][v], F) * scale;
        }
      }
      EACH(r, ROWS) EACH(v, VECTORS)
        store<WIDTH>(to + r * SCORE_STRIDE + v * WIDTH, totals[r][v] * q.scale[first + r]);
    };
    if (rows > MOST_ROWS_WITH_TOTALS || FEW_REGISTERS)  // more rows share the unpacking of a vector
      for_blocks<MOST_ROWS_WITH_ONE_SUM, MOST_VECTORS / 2>(rows, p.S, block);
    else
      for_blocks<MOST_ROWS_WITH_TOTALS, MOST_VECTORS>(rows, p.S, block);
  }
}

// The weights of each row, times the scales of values, as integers. They overwrite what follows the weights, which are
// bfloat16, in the rows of scores.
struct IntegerWeights {
  static constexpr ptrdiff_t stride = SCORE_STRIDE * sizeof(float);  // bytes between rows of integers
  int8_t* integers;
  float scales[ACC_BLOCK / 16][MAX_TILE_ROWS], inverses[ACC_BLOCK / 16][MAX_TILE_ROWS];  // of each WEIGHT_GROUP slots
  float offset[MAX_TILE_ROWS];                                                           // the sum of a row

  INLINE explicit IntegerWeights(float* scores)
      : integers(reinterpret_cast<int8_t*>(scores) + sizeof(bf16) * ACC_BLOCK) {
    static_assert(SCORE_STRIDE >= ACC_BLOCK * 3 / 4, "a row has weights and integers");
  }

  // Rounds the weights times the scales of group `group`, of `num_groups`, of values of `width` bytes. The first group
  // finds the scales of weights for all groups: a horizontal maximum costs more than the largest of the groups.
  template <class Page>
  INLINE void round(const VisiblePages<Page>& p, const float* scores, int rows, int width, int group, int num_groups,
                    Prefetcher<Page>& prefetcher) {
    const int lines = prefetcher.lines_per_step(p.key_bytes, rows * num_groups * p.S / WEIGHT_GROUP + 1);
    F totals[MAX_TILE_ROWS];
    for (int r = 0; r < rows; ++r) totals[r] = F{};
    int s = 0, i = 0;  // the next slot of the block, and its scale
    for (int j = 0; j < p.n; ++j) {
      const bf16* slots = slot_scales(p.values[j], p.S, width);
      for (int left = p.S, n; left; left -= n, slots += n, s += n, ++i) {
        n = left < WEIGHT_GROUP ? left : WEIGHT_GROUP;
        auto round_slots = [&](auto num_vectors) {
          constexpr int VECTORS = decltype(num_vectors)::value;
          const bf16* weights = reinterpret_cast<const bf16*>(scores) + s;
          if (group == 0) find_scales<VECTORS>(weights, rows, slots, p.S, num_groups, i);
          F of_values[VECTORS];
          EACH(v, VECTORS) of_values[v] = load<WIDTH>(slots + group * p.S + v * WIDTH);
          for (int r = 0; r < rows; ++r, weights += stride / sizeof(bf16)) {
            prefetcher.prefetch(lines);
            const F factor = splat(inverses[i][r]);
            I sum = {};
            EACH(v, VECTORS) {
              const F x = load<WIDTH>(weights + v * WIDTH) * of_values[v];
              sum += store_integers(integers + r * stride + s + v * WIDTH, x, factor);
            }
            totals[r] += __builtin_convertvector(sum, F) * scales[i][r];
          }
        };
        n == WEIGHT_GROUP ? round_slots(Constant<WEIGHT_GROUP / WIDTH>()) : round_slots(Constant<16 / WIDTH>());
      }
    }
    for (int r = 0; r < rows; ++r) offset[r] = reduce_sum<WIDTH>(totals[r]);
  }

 private:
  // Finds scale i of each row: that of VECTORS vectors of weights, with the largest of the scales of their values.
  template <int VECTORS>
  INLINE void find_scales(const bf16* weights, int rows, const bf16* slots, int S, int num_groups, int i) {
    F largest[VECTORS] = {};
    for (int g = 0; g < num_groups; ++g)
      EACH(v, VECTORS) largest[v] = max(largest[v], absolute(load<WIDTH>(slots + g * S + v * WIDTH)));
    for (int r = 0; r < rows; ++r, weights += stride / sizeof(bf16)) {
      F tops = {};
      EACH(v, VECTORS) tops = max(tops, load<WIDTH>(weights + v * WIDTH) * largest[v]);
      scales[i][r] = reduce_max<WIDTH>(tops) * (1 / LARGEST_INTEGER);
    }
    for (int r = 0; r < rows; ++r) inverses[i][r] = inverse(scales[i][r]);
  }
};

// Stores a vector of sums; of the last vector only those of `left` columns.
INLINE void store_sums(float* to, F x, int left) {
  left < WIDTH ? (void)memcpy(to, &x, left * sizeof(float)) : store<WIDTH>(to, x);
}

// Computes sums of values, in rows of partial_size(v_dim).
INLINE void sum_values(const VisiblePages<uint8_t>& p, float* scores, int rows, float* sums,
                       Prefetcher<uint8_t>& prefetcher) {
  IntegerWeights w(scores);
  w.round(p, scores, rows, p.v_dim, 0, 1, prefetcher);
  for_blocks<MOST_ROWS_WITH_TOTALS, MOST_VECTORS>(rows, p.v_dim, [&](int first, auto num_rows, int d, auto vectors) {
    constexpr int ROWS = decltype(num_rows)::value, VECTORS = decltype(vectors)::value;
    const int8_t* weights = w.integers + first * w.stride;
    const float(*scale)[MAX_TILE_ROWS] = w.scales;
    F totals[ROWS][VECTORS];
    EACH(r, ROWS) EACH(v, VECTORS) totals[r][v] = splat(-128 * w.offset[first + r]);
    for (int j = 0; j < p.n; ++j) {
      const uint8_t* values = reinterpret_cast<const uint8_t*>(p.values[j]) + 4 * d;
      for (int left = p.S, n; left; left -= n, weights += n, values += n * p.v_dim, ++scale) {
        n = left < WEIGHT_GROUP ? left : WEIGHT_GROUP;
        I products[ROWS][VECTORS] = {};
        add_products<VECTORS * WIDTH / 16>(products, weights, w.stride, values, n, p.v_dim, prefetcher);
        EACH(r, ROWS) EACH(v, VECTORS)
          totals[r][v] += __builtin_convertvector(products[r][v], F) * (*scale)[first + r];
      }
    }
    EACH(r, ROWS) EACH(v, VECTORS)
      store_sums(sums + (first + r) * partial_size(p.v_dim) + d + v * WIDTH, totals[r][v], p.v_dim - d - v * WIDTH);
  });
}

// Each group of dimensions has scales of its own, and so its own integer weights.
template <class Page>
INLINE void sum_nibble_values(const VisiblePages<Page>& p, float* scores, int rows, float* sums,
                              Prefetcher<Page>& prefetcher) {
  IntegerWeights w(scores);
  constexpr int KEY_BITS = std::is_same_v<Page, K8V4> ? 8 : 4;
  const int group = slot_group(p.v_dim), half = group / 2;
  for (int g = 0; g * group < p.v_dim; ++g) {
    w.round(p, scores, rows, p.v_dim / 2, g, p.v_dim / group, prefetcher);
    for_blocks<MOST_ROWS_WITH_HALF, MOST_VECTORS / 2>(rows, half, [&](int first, auto num_rows, int c, auto vectors) {
      constexpr int ROWS = decltype(num_rows)::value, VECTORS = decltype(vectors)::value;
      const int8_t* weights = w.integers + first * w.stride;
      const float(*scale)[MAX_TILE_ROWS] = w.scales;
      F low_totals[ROWS][VECTORS], high_totals[ROWS][VECTORS];
      EACH(r, ROWS) EACH(v, VECTORS) low_totals[r][v] = high_totals[r][v] = splat(-8 * w.offset[first + r]);
      for (int j = 0; j < p.n; ++j) {
        const uint8_t* values = reinterpret_cast<const uint8_t*>(p.values[j]) + 4 * (g * half + c);
        for (int left = p.S, n; left; left -= n, weights += n, values += n * p.v_dim / 2, ++scale) {
          n = left < WEIGHT_GROUP ? left : WEIGHT_GROUP;
          I low[ROWS][VECTORS] = {}, high[ROWS][VECTORS] = {};
          add_nibble_products<KEY_BITS>(low, high, weights, w.stride, 0, values, n, p.v_dim / 2, prefetcher);
          EACH(r, ROWS) EACH(v, VECTORS) {
            low_totals[r][v] += __builtin_convertvector(low[r][v], F) * (*scale)[first + r];
            high_totals[r][v] += __builtin_convertvector(high[r][v], F) * (*scale)[first + r];
          }
        }
      }
      EACH(r, ROWS) EACH(v, VECTORS) {
        float* to = sums + (first + r) * partial_size(p.v_dim) + g * group + c + v * WIDTH;
        store_sums(to, low_totals[r][v], half - c - v * WIDTH);
        store_sums(to + half, high_totals[r][v], half - c - v * WIDTH);
      }
    });
  }
}
#undef EACH

INLINE void sum_values(const VisiblePages<K8V4>& p, float* scores, int rows, float* sums,
                       Prefetcher<K8V4>& prefetcher) {
  sum_nibble_values(p, scores, rows, sums, prefetcher);
}
INLINE void sum_values(const VisiblePages<Nibbles>& p, float* scores, int rows, float* sums,
                       Prefetcher<Nibbles>& prefetcher) {
  sum_nibble_values(p, scores, rows, sums, prefetcher);
}

// Rounds the queries of a tile, scaled and rotated, into `memory`.
template <class Q>
INLINE void gather_queries(const AttentionArgs& args, const QueryTile& tile, float* memory, Queries<uint8_t>& q) {
  const int D = args.kv.k_dim, padded = (D + WIDTH - 1) / WIDTH * WIDTH, first = args.tables.query_start_loc[tile.b];
  const int group = args.kv.dtype == DType::int4 ? slot_group(D) : D, excess = args.kv.dtype == DType::int4 ? 8 : 128;
  q.rows = {reinterpret_cast<int8_t*>(memory), padded};
  alignas(64) float row[MAX_K_DIM + WIDTH] = {};
  for (int i = tile.begin, r = 0; i < tile.end; ++i, ++r) {
    const Q* from = static_cast<const Q*>(args.q.data) + (first + i / args.R) * args.q.token_stride +
                    (tile.g * args.R + i % args.R) * args.q.head_stride;
    for (int d = 0; d < D; ++d) row[d] = args.params.scale * to_float(from[d]);
    rotate(row, D);
    F tops = {};
    for (int d = 0; d < D; d += WIDTH) tops = max(tops, absolute(load<WIDTH>(row + d)));
    q.scale[r] = reduce_max<WIDTH>(tops) / LARGEST_INTEGER;
    const F factor = splat(inverse(q.scale[r]));
    int8_t* to = q.rows.data + r * q.rows.stride;
    for (int d = 0; d < padded; d += WIDTH) store_integers(to + d, load<WIDTH>(row + d), factor);
    for (int g = 0; g * group < D; ++g) {
      int sum = 0;
      for (int d = g * group; d < (g + 1) * group; ++d) sum += to[d];
      q.excess[r][g] = -excess * sum;
    }
  }
}

}  // namespace retain::RETAIN_ISA
