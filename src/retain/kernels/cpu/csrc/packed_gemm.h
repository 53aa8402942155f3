// Products with packed weights: y [rows, out] (+)= x [rows, in] W^T + b.
//
// A matrix is packed in tiles of 16 outputs, so that one vector holds a number of each and a core that takes whole
// tiles reads its weights in one stream:
//
//   float32    [in][16]             bfloat16   [in / 2][16][2]      pairs of inputs, as the dot product wants them
//   int4       for each group of 32 inputs [4][16][4]: low halves of the bytes are inputs 8i .. 8i+3, high 8i+4 .. 8i+7;
//              then scale [16] and shift [16], float16:   w = scale * q + shift
//   int8       for each group [8][16][4]: q + 128, for the instruction multiplies unsigned by signed;
//              then scale [16], float16:                  w = scale * q
//
// Scales stand with their group because a core reads one stream nearly twice as fast as two (docs/log.md).
// For int4 and int8 the activations too are rounded to 8 bits, group by group (`prepare_row`), so sums inside a group
// are exact integers. Every output is summed in the order of the inputs, whatever the number of rows: a token's bits
// depend neither on its company nor on the size of its chunk.
#pragma once

#include "simd.h"

namespace retain::RETAIN_ISA {

constexpr int PIECES = TILE_OUT / WIDTH;        // vectors of a tile
// From how many rows on two tiles at once pay. Fewer wait for the memory only, which gives one stream faster.
constexpr int pair_rows(Kind kind) { return kind == Kind::int8 ? 12 : 4; }

// Rows at once, so that their sums stay in registers.
constexpr int max_rows(Kind kind, int tiles) {
  if (WIDTH < 16) return 4;
  return tiles == 2 && (kind == Kind::int4 || kind == Kind::int8) ? 6 : 12;
}

INLINE int8_t* quanta_of(char* row) { return reinterpret_cast<int8_t*>(row); }
INLINE const GroupFacts* facts_of(const Packed& w, const char* row) {
  return reinterpret_cast<const GroupFacts*>(row + w.in);
}

// ---- rows of activations, made ready ---------------------------------------------------------------------------

INLINE void quantise(const float* x, int8_t* q, GroupFacts& facts) {
  F most = {}, zero = {};
  for (int i = 0; i < GROUP; i += WIDTH) {
    const F y = load<WIDTH>(x + i);
    most = max(most, absolute(y));
    zero += y * 0.0f;  // unless a number is infinite or none: then so is the scale
  }
  const float top = highest<WIDTH>(most), scale = top / 127 + sum<WIDTH>(zero), by = top > 0 ? 127 / top : 0.0f;
  I total = {};
  for (int i = 0; i < GROUP; i += WIDTH) {
    const I n = nearest(load<WIDTH>(x + i) * by);
    total += n;
    store_bytes(q + i, n);
  }
  int32_t sum = 0;
  for (int l = 0; l < WIDTH; ++l) sum += total[l];
  facts = {scale, scale * float(sum), -128 * sum};
}

INLINE void prepare_row(const Packed& w, const float* x, char* row) {
  if (w.kind == Kind::float32) {
    memcpy(row, x, size_t(w.in) * 4);
  } else if (w.kind == Kind::bfloat16) {
    bf16* to = reinterpret_cast<bf16*>(row);
    int i = 0;
    for (; i + WIDTH <= w.in; i += WIDTH) store_as(to + i, load<WIDTH>(x + i));
    for (; i < w.in; ++i) from_float(x[i], to[i]);
    to[w.in].bits = 0;  // the other of the last pair, where `in` is odd
  } else {
    GroupFacts* facts = reinterpret_cast<GroupFacts*>(row + w.in);
    for (int g = 0; g < w.groups(); ++g) quantise(x + g * GROUP, quanta_of(row) + g * GROUP, facts[g]);
  }
}

// ---- the products: sum[t][r] = row r times the outputs of one piece of tile t -----------------------------------

#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < n; ++i)

template <int TILES, int ROWS>
INLINE void product_float32(const Packed& w, const char* tile, int piece, const char* rows, F (&sum)[TILES][ROWS]) {
  const float* b = reinterpret_cast<const float*>(tile) + piece * WIDTH;
  const int64_t stride = w.row_bytes() / 4, next = w.tile_bytes() / 4;
  const float* a = reinterpret_cast<const float*>(rows);
  for (int k = 0; k < w.in; ++k, b += TILE_OUT) {
    F x[TILES];
    EACH(t, TILES) x[t] = load<WIDTH>(b + t * next);
    EACH(r, ROWS) EACH(t, TILES) sum[t][r] += a[r * stride + k] * x[t];
  }
}

template <int TILES, int ROWS>
INLINE void product_bfloat16(const Packed& w, const char* tile, int piece, const char* rows, F (&sum)[TILES][ROWS]) {
  const bf16* b = reinterpret_cast<const bf16*>(tile) + 2 * piece * WIDTH;
  const int64_t stride = w.row_bytes() / 2, next = w.tile_bytes() / 2;
  const bf16* a = reinterpret_cast<const bf16*>(rows);
  for (int k = 0; k < w.in; k += 2, b += 2 * TILE_OUT) {
    Pairs<WIDTH> x[TILES];
    EACH(t, TILES) x[t] = load_pairs<WIDTH>(b + t * next);
    EACH(r, ROWS) EACH(t, TILES) sum[t][r] = dot<WIDTH>(sum[t][r], x[t], a + r * stride + k);
  }
}

template <Kind KIND, int TILES, int ROWS>
INLINE void product_groups(const Packed& w, const char* tile, int piece, const char* rows, F (&sum)[TILES][ROWS]) {
  constexpr bool INT4 = KIND == Kind::int4;
  constexpr int STEP = 4 * TILE_OUT, STEPS = number_bytes(KIND) / STEP;  // bytes of a step; steps of a group
  const char* group = tile;
  const int64_t stride = w.row_bytes(), next = w.tile_bytes();
  const char* a = rows;
  const GroupFacts* facts = facts_of(w, rows);
  for (int g = 0; g < w.groups(); ++g) {
    I inside[TILES][ROWS];
    auto facts_of_row = [&](int r) -> const GroupFacts& {
      return *reinterpret_cast<const GroupFacts*>(reinterpret_cast<const char*>(facts + g) + r * stride);
    };
    EACH(r, ROWS) EACH(t, TILES) inside[t][r] = INT4 ? I{} : splat(facts_of_row(r).offset);
    const uint8_t* b = reinterpret_cast<const uint8_t*>(group) + 4 * piece * WIDTH;
    EACH(i, STEPS) {
      Bytes x[TILES];
      EACH(t, TILES) x[t] = load_bytes(b + i * STEP + t * next);
      if constexpr (INT4) {
        Bytes low[TILES], high[TILES];
        EACH(t, TILES) low[t] = low_halves(x[t]), high[t] = high_halves(x[t]);
        EACH(r, ROWS) EACH(t, TILES) inside[t][r] = dot(inside[t][r], low[t], a + r * stride + 8 * i);
        EACH(r, ROWS) EACH(t, TILES) inside[t][r] = dot(inside[t][r], high[t], a + r * stride + 8 * i + 4);
      } else {
        EACH(r, ROWS) EACH(t, TILES) inside[t][r] = dot(inside[t][r], x[t], a + r * stride + 4 * i);
      }
    }
    EACH(t, TILES) {
      const half* scales = reinterpret_cast<const half*>(group + number_bytes(KIND) + t * next) + piece * WIDTH;
      const F scale = load<WIDTH>(scales);
      EACH(r, ROWS) sum[t][r] += __builtin_convertvector(inside[t][r], F) * (scale * facts_of_row(r).scale);
      if constexpr (INT4) {
        const F shift = load<WIDTH>(scales + TILE_OUT);
        EACH(r, ROWS) sum[t][r] += shift * facts_of_row(r).sum;
      }
    }
    group += group_bytes(KIND);
    a += GROUP;
  }
}

// Outputs first .. of all rows, as far as there are any.
template <int ROWS>
INLINE void put(const Packed& w, int first, const Into& into, const F (&sum)[ROWS]) {
  const int n = w.out - first;
  float bias[WIDTH] = {};
  if (into.bias)
    for (int i = 0; i < WIDTH && i < n; ++i) bias[i] = into.bias[first + i];
  for (int r = 0; r < ROWS; ++r) {
    float* y = into.y + r * into.ldy + first;
    F x = sum[r] + load<WIDTH>(bias);
    if (n >= WIDTH) {
      store<WIDTH>(y, into.add ? load<WIDTH>(y) + x : x);
    } else {
      for (int i = 0; i < n; ++i) y[i] = into.add ? y[i] + x[i] : x[i];
    }
  }
}

template <Kind KIND, int TILES, int ROWS>
INLINE void some_rows(const Packed& w, int t, const char* rows, const Into& into) {
  const char* tile = w.data + t * w.tile_bytes();
  for (int piece = 0; piece < PIECES; ++piece) {
    F sum[TILES][ROWS] = {};
    if constexpr (KIND == Kind::float32) product_float32(w, tile, piece, rows, sum);
    if constexpr (KIND == Kind::bfloat16) product_bfloat16(w, tile, piece, rows, sum);
    if constexpr (KIND == Kind::int8 || KIND == Kind::int4) product_groups<KIND>(w, tile, piece, rows, sum);
    for (int i = 0; i < TILES; ++i) put(w, (t + i) * TILE_OUT + piece * WIDTH, into, sum[i]);
  }
}

template <Kind KIND, int TILES, int ROWS>
void last_rows_of(const Packed& w, int tile, const char* rows, int n, const Into& into) {
  if constexpr (ROWS > 0) {
    if (n == ROWS)
      some_rows<KIND, TILES, ROWS>(w, tile, rows, into);
    else
      last_rows_of<KIND, TILES, ROWS - 1>(w, tile, rows, n, into);
  }
}

template <Kind KIND, int TILES>
void all_rows(const Packed& w, int tile, const char* rows, int n, Into into) {
  constexpr int MOST = max_rows(KIND, TILES);
  for (; n >= MOST; n -= MOST) {
    some_rows<KIND, TILES, MOST>(w, tile, rows, into);
    rows += MOST * w.row_bytes();
    into.y += MOST * into.ldy;
  }
  last_rows_of<KIND, TILES, MOST - 1>(w, tile, rows, n, into);
}

template <Kind KIND>
void all_tiles(const Packed& w, int begin, int end, const char* rows, int n, const Into& into) {
  if constexpr (WIDTH == 16)
    for (; n >= pair_rows(KIND) && end - begin > 1; begin += 2) all_rows<KIND, 2>(w, begin, rows, n, into);
  for (; begin < end; ++begin) all_rows<KIND, 1>(w, begin, rows, n, into);
}
#undef EACH

// ---- the other way round: one row of the matrix ------------------------------------------------------------------

INLINE float number(const Packed& w, const char* tile, int o, int i) {
  if (w.kind == Kind::float32) return reinterpret_cast<const float*>(tile)[i * TILE_OUT + o];
  if (w.kind == Kind::bfloat16)
    return to_float(reinterpret_cast<const bf16*>(tile)[i / 2 * 2 * TILE_OUT + 2 * o + i % 2]);
  const char* group = tile + i / GROUP * group_bytes(w.kind);
  const uint8_t* q = reinterpret_cast<const uint8_t*>(group);
  const half* scales = reinterpret_cast<const half*>(group + number_bytes(w.kind)) + o;
  const int k = i % GROUP;
  if (w.kind == Kind::int8) return to_float(scales[0]) * (int(q[k / 4 * 4 * TILE_OUT + 4 * o + k % 4]) - 128);
  const uint8_t both = q[k / 8 * 4 * TILE_OUT + 4 * o + k % 4];
  return to_float(scales[0]) * (k % 8 < 4 ? both & 15 : both >> 4) + to_float(scales[TILE_OUT]);
}

}  // namespace retain::RETAIN_ISA
