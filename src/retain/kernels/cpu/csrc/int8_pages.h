// The two products of attention with pages of int8 slots.
//
// Queries, and weights times the scales of values, become integers of 12 bits and a sign, each in two signed bytes:
// 64 high + low. Both are between -64 and 64, because AVX2 adds two products with a stored byte in 16 bits. Sums are
// exact in 32 bits: |q| <= 2^12, a byte is below 2^8, and a sum has at most 2^9 terms. So bits depend neither on the
// order of sums nor on the instructions that compute them.
//
//   keys    u8 [D / 4][S][4], 128 too high; then bfloat16 scales [S]
//   values  u8 [S / 4][D][4], 128 too high; then bfloat16 scales [S]
#pragma once

#include "page_gemm.h"

namespace retain::RETAIN_ISA {

template <>
inline constexpr int INTERLEAVE<uint8_t> = 4;

constexpr float LARGEST_INTEGER = 4096;
constexpr int INT8_ROWS = FEW_REGISTERS ? 1 : 3;     // rows of a register block
constexpr int INT8_VECTORS = FEW_REGISTERS ? 2 : 4;  // vectors of columns of a register block

INLINE const bf16* slot_scales(const uint8_t* page, int S, int D) {
  return reinterpret_cast<const bf16*>(page + S * D);
}

// Transforms D numbers as `rotate` in kernels/int8_slots.py does, to the bit.
INLINE void rotate(float* x, int D) {
  const int block = D & -D;
  const float factor = float(1 / __builtin_sqrt(block));
  for (float* y = x; y < x + D; y += block) {
    for (int h = 1; h < block; h *= 2)
      for (int i = 0; i < block; i += 2 * h)
        for (int j = i; j < i + h; ++j) {
          const float a = y[j], b = y[j + h];
          y[j] = a + b, y[j + h] = a - b;
        }
    for (int i = 0; i < block; ++i) y[i] *= factor;
  }
}

// Rows of integers, in two planes.
struct IntegerRows {
  int8_t *high, *low;
  ptrdiff_t stride;
};

// Rounds n numbers, a multiple of WIDTH, to integers times the returned scale. `tops` has the largest magnitude of each
// lane. `offset` becomes 128 times the sum of the integers.
INLINE float round_row(const float* x, int n, F tops, int8_t* high, int8_t* low, int32_t& offset) {
  const float largest = reduce_max<WIDTH>(tops);
  const F factor = splat(largest > 0 ? LARGEST_INTEGER / largest : 0.0f);
  I sum = {};
  for (int i = 0; i < n; i += WIDTH) {
    const I y = round_to_int(load<WIDTH>(x + i) * factor), lower = (y << 26) >> 26;
    store_bytes(low + i, lower);
    store_bytes(high + i, (y - lower) >> 6);
    sum += y;
  }
  int32_t lanes[WIDTH], total = 0;
  memcpy(lanes, &sum, sizeof sum);
  for (int32_t lane : lanes) total += lane;
  offset = 128 * total;
  return largest / LARGEST_INTEGER;
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Columns of B [depth, columns] in `num_parts` equal parts, quads of whose rows are interleaved.
struct ByteParts {
  const uint8_t* const* parts;
  const uint8_t* const* prefetch;  // what is read after each part
  int num_parts, depth, columns;
};

// Computes VECTORS vectors of columns of ROWS rows, and calls store(row, vector, sums) for each.
template <int VECTORS, int ROWS, class Store>
INLINE void integer_block(const IntegerRows& a, const ByteParts& p, int column, bool prefetch, const Store& store) {
#define EACH(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < n; ++i)
  I high[ROWS][VECTORS] = {}, low[ROWS][VECTORS] = {};
  for (int part = 0; part < p.num_parts; ++part) {
    const uint8_t* b = p.parts[part] + 4 * column;
    const ptrdiff_t next = distance(p.parts[part], p.prefetch[part]);
    const char* at_high = reinterpret_cast<const char*>(a.high + part * p.depth);
    const char* at_low = reinterpret_cast<const char*>(a.low + part * p.depth);
    for (int i = 0; i < p.depth; i += 4, b += 4 * p.columns) {
      Bytes x[VECTORS];
      if (prefetch) EACH(v, VECTORS * WIDTH / 16 + 1) __builtin_prefetch(b + next + 64 * v, 0, 2);
      EACH(v, VECTORS) x[v] = load_bytes(b + 4 * WIDTH * v);
      EACH(r, ROWS) EACH(v, VECTORS) high[r][v] = dot_narrow(high[r][v], x[v], at_high + r * a.stride + i);
      EACH(r, ROWS) EACH(v, VECTORS) low[r][v] = dot_narrow(low[r][v], x[v], at_low + r * a.stride + i);
    }
  }
  EACH(r, ROWS) EACH(v, VECTORS) store(r, v, high[r][v] * 64 + low[r][v]);
#undef EACH
}

template <int VECTORS, class Store>
INLINE void integer_strip(IntegerRows a, const ByteParts& p, int column, int rows, const Store& store) {
  int r = 0;
  auto block = [&](auto num_rows) {
    integer_block<VECTORS, decltype(num_rows)::value>(
        a, p, column, r == 0, [&](int i, int v, I sums) { store(r + i, column + v * WIDTH, sums); });
    a.high += decltype(num_rows)::value * a.stride, a.low += decltype(num_rows)::value * a.stride;
    r += decltype(num_rows)::value;
  };
  while (rows - r >= INT8_ROWS) block(Constant<INT8_ROWS>());
  while (rows - r > 0) block(Constant<1>());
}

// Calls store(row, first column, sums) for every row and every vector of columns. The last one may reach beyond.
template <class Store>
INLINE void integer_gemm(const IntegerRows& a, const ByteParts& p, int rows, const Store& store) {
  int c = 0;
  for (; p.columns - c >= INT8_VECTORS * WIDTH; c += INT8_VECTORS * WIDTH)
    integer_strip<INT8_VECTORS>(a, p, c, rows, store);
  for (; c < p.columns; c += WIDTH) integer_strip<1>(a, p, c, rows, store);
}

template <>
struct Queries<uint8_t> {
  IntegerRows rows;
  float scale[MAX_TILE_ROWS];
  int32_t offset[MAX_TILE_ROWS];
};

// Computes scores [rows, SCORE_STRIDE].
INLINE void score_pages(const VisiblePages<uint8_t>& p, const Queries<uint8_t>& q, int rows, float* scores) {
  for (int j = 0; j < p.n; ++j) {
    const bf16* scales = slot_scales(p.keys[j], p.S, p.D);
    integer_gemm(q.rows, {p.keys + j, p.values + j, 1, p.D, p.S}, rows, [&](int r, int s, I sums) {
      const F products = __builtin_convertvector(sums - q.offset[r], F) * q.scale[r];
      store<WIDTH>(scores + r * SCORE_STRIDE + j * p.S + s, products * load<WIDTH>(scales + s));
    });
  }
}

// Computes sums of values, in rows of partial_size(D). `scores` holds the rows' weights in bfloat16; the rest of each
// row of scores is overwritten.
INLINE void sum_values(const VisiblePages<uint8_t>& p, float* scores, int rows, float* sums) {
  static_assert(SCORE_STRIDE * sizeof(float) >= 4 * size_t(ACC_BLOCK), "a row has room for its weights and two planes");
  alignas(64) float scaled[ACC_BLOCK];
  float scale[MAX_TILE_ROWS];
  int32_t offset[MAX_TILE_ROWS];
  int8_t* const planes = reinterpret_cast<int8_t*>(scores) + sizeof(bf16) * ACC_BLOCK;
  const IntegerRows weights = {planes, planes + ACC_BLOCK, SCORE_STRIDE * ptrdiff_t(sizeof(float))};
  for (int r = 0; r < rows; ++r) {
    const bf16* row = reinterpret_cast<const bf16*>(scores + r * SCORE_STRIDE);
    F tops = {};  // weights and scales are not negative
    for (int j = 0; j < p.n; ++j) {
      const bf16* scales = slot_scales(p.values[j], p.S, p.D);
      for (int s = 0; s < p.S; s += WIDTH) {
        const F x = load<WIDTH>(row + j * p.S + s) * load<WIDTH>(scales + s);
        store<WIDTH>(scaled + j * p.S + s, x);
        tops = max(tops, x);
      }
    }
    scale[r] = round_row(scaled, p.n * p.S, tops, weights.high + r * weights.stride, weights.low + r * weights.stride,
                         offset[r]);
  }
  integer_gemm(weights, {p.values, p.next_keys, p.n, p.S, p.D}, rows, [&](int r, int d, I x) {
    const F products = __builtin_convertvector(x - offset[r], F) * scale[r];
    const int n = p.D - d < WIDTH ? p.D - d : WIDTH;
    memcpy(sums + r * partial_size(p.D) + d, &products, n * sizeof(float));
  });
}

// Rounds the queries of a tile, scaled and rotated, into `memory`.
template <class Q>
INLINE void gather_queries(const AttentionArgs& args, const QueryTile& tile, float* memory, Queries<uint8_t>& q) {
  const int D = args.kv.D, padded = (D + WIDTH - 1) / WIDTH * WIDTH, first = args.tables.query_start_loc[tile.b];
  int8_t* const planes = reinterpret_cast<int8_t*>(memory);
  q.rows = {planes, planes + padded, 2 * padded};
  alignas(64) float row[MAX_HEAD_DIM + WIDTH] = {};
  for (int i = tile.begin, r = 0; i < tile.end; ++i, ++r) {
    const Q* from = static_cast<const Q*>(args.q.data) + (first + i / args.R) * args.q.token_stride +
                    (tile.g * args.R + i % args.R) * args.q.head_stride;
    for (int d = 0; d < D; ++d) row[d] = args.scale * to_float(from[d]);
    rotate(row, D);
    F tops = {};
    for (int d = 0; d < D; d += WIDTH) tops = max(tops, absolute(load<WIDTH>(row + d)));
    q.scale[r] = round_row(row, padded, tops, planes + r * q.rows.stride, planes + r * q.rows.stride + padded, q.offset[r]);
  }
}

}  // namespace retain::RETAIN_ISA
