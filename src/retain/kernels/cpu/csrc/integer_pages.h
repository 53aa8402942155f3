// The two products of attention with pages of quantized slots.
//
// Queries, and weights times the scales of values, become integers of 12 bits and a sign, each in two signed bytes:
// 64 high + low. Both are between -64 and 64, because AVX2 adds two products with a stored byte in 16 bits. Sums are
// exact in 32 bits: |q| <= 2^12, a byte is below 2^8, and a sum has at most 2^9 terms. So bits depend neither on the
// order of sums nor on the instructions that compute them.
//
//   keys    int8: u8 [D / 4][S][4], 128 too high; then bfloat16 scales [S]
//           4 bits: u8 [D / 8][S][4] of two numbers, 8 too high; then bfloat16 scales [D / group][S]
//   values  int8: u8 [S / 4][D][4], 128 too high; then bfloat16 scales [S]
//           4 bits: u8 [S / 4][D / 2][4] of two numbers, 8 too high; then bfloat16 scales [D / group][S]
#pragma once

#include "page_gemm.h"

namespace retain::RETAIN_ISA {

template <>
inline constexpr int INTERLEAVE<uint8_t> = 4;

constexpr float LARGEST_INTEGER = 4096;
constexpr int INT8_ROWS = FEW_REGISTERS ? 1 : 3;     // rows of a register block
constexpr int INT8_VECTORS = FEW_REGISTERS ? 2 : 4;  // vectors of columns of a register block

struct K8V4 {  // the type of a page of 8-bit keys and 4-bit values
  uint8_t byte;
};
struct Nibbles {  // the type of a page of 4-bit keys and values
  uint8_t byte;
};

// The scales that follow S slots of `width` bytes.
INLINE const bf16* slot_scales(const void* page, int S, int width) {
  return reinterpret_cast<const bf16*>(static_cast<const uint8_t*>(page) + S * width);
}

// One step of the transform of n numbers: sums and differences of numbers H apart. A constant H makes vectors of it.
template <int H>
INLINE void butterflies(float* x, int n) {
  for (int i = 0; i < n; i += 2 * H)
    for (int j = i; j < i + H; ++j) {
      const float a = x[j], b = x[j + H];
      x[j] = a + b, x[j + H] = a - b;
    }
}

// Transforms D numbers as `rotate` in kernels/quantized_slots.py does, to the bit.
INLINE void rotate(float* x, int D) {
  static_assert(MAX_HEAD_DIM <= 256, "a block has at most 2^8 numbers");
  const int block = D & -D;
  const float factor = float(1 / __builtin_sqrt(block));
  for (float* y = x; y < x + D; y += block) {
    if (block > 1) butterflies<1>(y, block);
    if (block > 2) butterflies<2>(y, block);
    if (block > 4) butterflies<4>(y, block);
    if (block > 8) butterflies<8>(y, block);
    if (block > 16) butterflies<16>(y, block);
    if (block > 32) butterflies<32>(y, block);
    if (block > 64) butterflies<64>(y, block);
    if (block > 128) butterflies<128>(y, block);
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

// Columns begin .. end - 1 of B [depth, stride] in `num_parts` equal parts, quads of whose rows are interleaved.
template <class Page>
struct IntegerParts {
  const Page* const* parts;
  const Page* const* prefetch;  // what is read after each part
  int num_parts, depth, stride, begin, end;
};

// Computes VECTORS vectors of columns of ROWS rows, and calls store(row, vector, n, sums) for number n of each byte.
template <int NUMBERS, int VECTORS, int ROWS, class Page, class Store>
INLINE void integer_block(const IntegerRows& a, const IntegerParts<Page>& p, int column, bool prefetch,
                          const Store& store) {
#define EACH(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < n; ++i)
  I high[NUMBERS][ROWS][VECTORS] = {}, low[NUMBERS][ROWS][VECTORS] = {};
  for (int part = 0; part < p.num_parts; ++part) {
    const uint8_t* b = reinterpret_cast<const uint8_t*>(p.parts[part]) + 4 * column;
    const ptrdiff_t next = distance(p.parts[part], p.prefetch[part]);
    const char* at_high = reinterpret_cast<const char*>(a.high + part * p.depth);
    const char* at_low = reinterpret_cast<const char*>(a.low + part * p.depth);
    for (int i = 0; i < p.depth; i += 4, b += 4 * p.stride) {
      Bytes x[VECTORS];
      if (prefetch) EACH(v, VECTORS * WIDTH / 16 + 1) __builtin_prefetch(b + next + 64 * v, 0, 2);
      EACH(v, VECTORS) x[v] = load_bytes(b + 4 * WIDTH * v);
      EACH(n, NUMBERS) {
        Bytes y[VECTORS];
        EACH(v, VECTORS) y[v] = NUMBERS == 1 ? x[v] : n ? high_nibbles(x[v]) : low_nibbles(x[v]);
        EACH(r, ROWS) EACH(v, VECTORS) high[n][r][v] = dot_narrow(high[n][r][v], y[v], at_high + r * a.stride + i);
        EACH(r, ROWS) EACH(v, VECTORS) low[n][r][v] = dot_narrow(low[n][r][v], y[v], at_low + r * a.stride + i);
      }
    }
  }
  EACH(n, NUMBERS) EACH(r, ROWS) EACH(v, VECTORS) store(r, v, n, high[n][r][v] * 64 + low[n][r][v]);
#undef EACH
}

template <int NUMBERS, int VECTORS, class Page, class Store>
INLINE void integer_strip(IntegerRows a, const IntegerParts<Page>& p, int column, int rows, const Store& store) {
  int r = 0;
  auto block = [&](auto num_rows) {
    integer_block<NUMBERS, VECTORS, decltype(num_rows)::value>(
        a, p, column, r == 0, [&](int i, int v, int n, I sums) { store(r + i, column + v * WIDTH, n, sums); });
    a.high += decltype(num_rows)::value * a.stride, a.low += decltype(num_rows)::value * a.stride;
    r += decltype(num_rows)::value;
  };
  while (rows - r >= INT8_ROWS) block(Constant<INT8_ROWS>());
  while (rows - r > 0) block(Constant<1>());
}

// Calls store(row, first column, n, sums) for every row, every vector of columns, and number n of each byte. The last
// vector may reach beyond the columns.
template <int NUMBERS, class Page, class Store>
INLINE void integer_gemm(const IntegerRows& a, const IntegerParts<Page>& p, int rows, const Store& store) {
  constexpr int VECTORS = INT8_VECTORS / NUMBERS;
  int c = p.begin;
  for (; p.end - c >= VECTORS * WIDTH; c += VECTORS * WIDTH) integer_strip<NUMBERS, VECTORS>(a, p, c, rows, store);
  for (; c < p.end; c += WIDTH) integer_strip<NUMBERS, 1>(a, p, c, rows, store);
}

template <>
struct Queries<uint8_t> {
  IntegerRows rows;
  float scale[MAX_TILE_ROWS];
  int32_t offset[MAX_TILE_ROWS];  // 128 times the sum of a row
  int32_t group_sums[MAX_TILE_ROWS][MAX_HEAD_DIM / 8];  // the sums of a row's groups
};

template <class Page>
INLINE void score_integer_pages(const VisiblePages<Page>& p, const Queries<uint8_t>& q, int rows, float* scores) {
  for (int j = 0; j < p.n; ++j) {
    const bf16* scales = slot_scales(p.keys[j], p.S, p.D);
    const IntegerParts<Page> keys = {p.keys + j, p.values + j, 1, p.D, p.S, 0, p.S};
    integer_gemm<1>(q.rows, keys, rows, [&](int r, int s, int, I sums) {
      const F products = __builtin_convertvector(sums - q.offset[r], F) * q.scale[r];
      store<WIDTH>(scores + r * SCORE_STRIDE + j * p.S + s, products * load<WIDTH>(scales + s));
    });
  }
}

// Computes scores [rows, SCORE_STRIDE].
INLINE void score_pages(const VisiblePages<uint8_t>& p, const Queries<uint8_t>& q, int rows, float* scores) {
  score_integer_pages(p, q, rows, scores);
}
INLINE void score_pages(const VisiblePages<K8V4>& p, const Queries<uint8_t>& q, int rows, float* scores) {
  score_integer_pages(p, q, rows, scores);
}

// Computes VECTORS vectors of scores of ROWS rows with one group of keys of 4 bits. Byte i of the group holds numbers i
// and i + half, which go with numbers i and i + half of the queries.
template <int VECTORS, int ROWS, class Store>
INLINE void nibble_key_block(const IntegerRows& a, const uint8_t* keys, int S, int half, int column, const Store& store) {
#define EACH(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < n; ++i)
  I high[ROWS][VECTORS] = {}, low[ROWS][VECTORS] = {};
  for (int i = 0; i < half; i += 4) {
    Bytes x[VECTORS];
    EACH(v, VECTORS) x[v] = load_bytes(keys + i * S + 4 * (column + WIDTH * v));
    EACH(n, 2) {
      Bytes y[VECTORS];
      EACH(v, VECTORS) y[v] = n ? high_nibbles(x[v]) : low_nibbles(x[v]);
      const char* at_high = reinterpret_cast<const char*>(a.high + n * half + i);
      const char* at_low = reinterpret_cast<const char*>(a.low + n * half + i);
      EACH(r, ROWS) EACH(v, VECTORS) high[r][v] = dot_narrow(high[r][v], y[v], at_high + r * a.stride);
      EACH(r, ROWS) EACH(v, VECTORS) low[r][v] = dot_narrow(low[r][v], y[v], at_low + r * a.stride);
    }
  }
  EACH(r, ROWS) EACH(v, VECTORS) store(r, column + WIDTH * v, high[r][v] * 64 + low[r][v]);
#undef EACH
}

// Each group of dimensions has scales of its own: its products are added to the scores of the groups before it.
INLINE void score_pages(const VisiblePages<Nibbles>& p, const Queries<uint8_t>& q, int rows, float* scores) {
  const int group = slot_group(p.D), half = group / 2;
  for (int j = 0; j < p.n; ++j)
    for (int g = 0; g * group < p.D; ++g) {
      const uint8_t* keys = reinterpret_cast<const uint8_t*>(p.keys[j]) + g * half * p.S;
      const bf16* scales = slot_scales(p.keys[j], p.S, p.D / 2) + g * p.S;
      for (int r = 0; r < rows;) {
        auto block = [&](auto num_vectors, auto num_rows, int column) {
          constexpr int VECTORS = decltype(num_vectors)::value, ROWS = decltype(num_rows)::value;
          const IntegerRows a = {q.rows.high + r * q.rows.stride + g * group, q.rows.low + r * q.rows.stride + g * group,
                                 q.rows.stride};
          nibble_key_block<VECTORS, ROWS>(a, keys, p.S, half, column, [&](int i, int s, I sums) {
            float* to = scores + (r + i) * SCORE_STRIDE + j * p.S + s;
            const F products = __builtin_convertvector(sums - 8 * q.group_sums[r + i][g], F) * q.scale[r + i];
            const F scaled = products * load<WIDTH>(scales + s);
            store<WIDTH>(to, g ? load<WIDTH>(to) + scaled : scaled);
          });
        };
        auto strip = [&](auto num_rows) {
          int c = 0;
          for (; p.S - c >= INT8_VECTORS * WIDTH; c += INT8_VECTORS * WIDTH) block(Constant<INT8_VECTORS>(), num_rows, c);
          for (; c < p.S; c += WIDTH) block(Constant<1>(), num_rows, c);
          r += decltype(num_rows)::value;
        };
        rows - r >= INT8_ROWS ? strip(Constant<INT8_ROWS>()) : strip(Constant<1>());
      }
    }
}

// The weights of each row, times the scales of values, as integers. They overwrite what follows the weights, which are
// bfloat16, in the rows of scores.
struct IntegerWeights {
  IntegerRows rows;
  float scale[MAX_TILE_ROWS];
  int32_t offset[MAX_TILE_ROWS];  // 128 times the sum of a row

  template <class Page>
  INLINE void round(const VisiblePages<Page>& p, float* scores, int num_rows, int width, int group) {
    static_assert(SCORE_STRIDE * sizeof(float) >= 4 * size_t(ACC_BLOCK), "a row has room for its weights and two planes");
    alignas(64) float scaled[ACC_BLOCK];
    int8_t* const planes = reinterpret_cast<int8_t*>(scores) + sizeof(bf16) * ACC_BLOCK;
    rows = {planes, planes + ACC_BLOCK, SCORE_STRIDE * ptrdiff_t(sizeof(float))};
    for (int r = 0; r < num_rows; ++r) {
      const bf16* row = reinterpret_cast<const bf16*>(scores + r * SCORE_STRIDE);
      F tops = {};
      for (int j = 0; j < p.n; ++j) {
        const bf16* scales = slot_scales(p.values[j], p.S, width) + group * p.S;
        for (int s = 0; s < p.S; s += WIDTH) {
          const F x = load<WIDTH>(row + j * p.S + s) * load<WIDTH>(scales + s);
          store<WIDTH>(scaled + j * p.S + s, x);
          tops = max(tops, absolute(x));
        }
      }
      scale[r] = round_row(scaled, p.n * p.S, tops, rows.high + r * rows.stride, rows.low + r * rows.stride, offset[r]);
    }
  }
};

// Computes sums of values, in rows of partial_size(D).
INLINE void sum_values(const VisiblePages<uint8_t>& p, float* scores, int rows, float* sums) {
  IntegerWeights w;
  w.round(p, scores, rows, p.D, 0);
  const IntegerParts<uint8_t> values = {p.values, p.next_keys, p.n, p.S, p.D, 0, p.D};
  integer_gemm<1>(w.rows, values, rows, [&](int r, int d, int, I x) {
    const F products = __builtin_convertvector(x - w.offset[r], F) * w.scale[r];
    memcpy(sums + r * partial_size(p.D) + d, &products, (p.D - d < WIDTH ? p.D - d : WIDTH) * sizeof(float));
  });
}

// Each group of dimensions has scales of its own, and so its own integer weights.
template <class Page>
INLINE void sum_nibble_values(const VisiblePages<Page>& p, float* scores, int rows, float* sums) {
  IntegerWeights w;
  const int group = slot_group(p.D), half = group / 2;
  for (int g = 0; g * group < p.D; ++g) {
    w.round(p, scores, rows, p.D / 2, g);
    const IntegerParts<Page> values = {p.values, p.next_keys, p.n, p.S, p.D / 2, g * half, (g + 1) * half};
    integer_gemm<2>(w.rows, values, rows, [&](int r, int c, int n, I x) {
      const F products = __builtin_convertvector(x - w.offset[r] / 16, F) * w.scale[r];
      const int left = values.end - c, d = g * half + n * half + c;
      memcpy(sums + r * partial_size(p.D) + d, &products, (left < WIDTH ? left : WIDTH) * sizeof(float));
    });
  }
}

INLINE void sum_values(const VisiblePages<K8V4>& p, float* scores, int rows, float* sums) {
  sum_nibble_values(p, scores, rows, sums);
}
INLINE void sum_values(const VisiblePages<Nibbles>& p, float* scores, int rows, float* sums) {
  sum_nibble_values(p, scores, rows, sums);
}

// Rounds the queries of a tile, scaled and rotated, into `memory`.
template <class Q>
INLINE void gather_queries(const AttentionArgs& args, const QueryTile& tile, float* memory, Queries<uint8_t>& q) {
  const int D = args.kv.D, group = slot_group(D), padded = (D + WIDTH - 1) / WIDTH * WIDTH, first = args.tables.query_start_loc[tile.b];
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
    const int8_t *high = planes + r * q.rows.stride, *low = high + padded;
    for (int g = 0; args.kv.dtype == DType::int4 && g * group < D; ++g) {
      q.group_sums[r][g] = 0;
      for (int d = g * group; d < (g + 1) * group; ++d) q.group_sums[r][g] += 64 * high[d] + low[d];
    }
  }
}

}  // namespace retain::RETAIN_ISA
