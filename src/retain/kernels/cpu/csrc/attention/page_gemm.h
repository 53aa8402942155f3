// The two products of attention with the visible pages of a block: queries times keys, and weights times values. Tiles
// compute them where the instruction set has tiles and the shapes are whole tiles; vectors compute the same bits.
#pragma once

#include "gemm/gemm.h"

namespace retain::RETAIN_ISA {

constexpr int MAX_BLOCK_PAGES = ACC_BLOCK / 16;  // a page has at least 16 slots
constexpr int MAX_PREFETCH_ROWS = 12;            // more rows of tiles hide the memory latency by themselves

// The n pages of a block that have a visible slot, and for each a page of keys that is read later.
template <class T>
struct VisiblePages {
  int n, S, k_dim, v_dim;
  int64_t key_bytes, value_bytes;  // of a page, scales included
  const T* keys[MAX_BLOCK_PAGES];
  const T* values[MAX_BLOCK_PAGES];
  const T* next_keys[MAX_BLOCK_PAGES];
};

#ifdef RETAIN_TILES

constexpr int MIN_ATTENTION_ROWS = 3;  // fewer are faster on vectors

// Rows of attention are at most one strip (`max_tile_rows` in isa.cpp).
INLINE bool score_by_tiles(const VisiblePages<bf16>& p, const bf16* q, int rows, float* scores,
                           Prefetcher<bf16>& prefetcher) {
  if (rows < MIN_ATTENTION_ROWS || p.k_dim % TILE_DEPTH) return false;
  for (int j = 0; j < p.n && rows <= MAX_PREFETCH_ROWS; ++j) prefetcher.prefetch(int(p.value_bytes / 64));
  Tiles tiles;
  const TileStrip strip(rows);
  configure_bfloat16(tiles, strip);
  for (int j = 0; j < p.n; ++j) {
    const TileOperands part = {q, p.keys[j]};
    tile_gemm(tiles, strip, {&part, 1, p.k_dim, p.k_dim, 2 * p.S, 2 * TILE_ROWS, scores + j * p.S, SCORE_STRIDE}, p.S);
  }
  return true;
}

INLINE bool sum_by_tiles(const VisiblePages<bf16>& p, const bf16* weights, ptrdiff_t stride, int rows, float* sums) {
  if (rows < MIN_ATTENTION_ROWS || p.S % TILE_DEPTH || p.v_dim % TILE_ROWS) return false;
  TileOperands parts[MAX_BLOCK_PAGES];
  for (int j = 0; j < p.n; ++j) parts[j] = {weights + j * p.S, p.values[j]};
  Tiles tiles;
  const TileStrip strip(rows);
  configure_bfloat16(tiles, strip);
  tile_gemm(tiles, strip, {parts, p.n, p.S, stride, 2 * p.v_dim, 2 * TILE_ROWS, sums, partial_size(p.v_dim)}, p.v_dim);
  return true;
}

INLINE bool score_by_tiles(const VisiblePages<float>&, const float*, int, float*, Prefetcher<float>&) { return false; }
INLINE bool sum_by_tiles(const VisiblePages<float>&, const float*, ptrdiff_t, int, float*) { return false; }

#endif

// The queries of a tile, [rows, D].
template <class T>
struct Queries {
  const Multiplier<T>* rows;
};

// Computes scores [rows, SCORE_STRIDE].
template <class T>
INLINE void score_pages(const VisiblePages<T>& p, const Queries<T>& queries, int rows, float* scores,
                        Prefetcher<T>& prefetcher) {
  const Multiplier<T>* q = queries.rows;
#ifdef RETAIN_TILES
  if (score_by_tiles(p, q, rows, scores, prefetcher)) return;
#endif
  for (int j = 0; j < p.n; ++j)
    gemm<T>({q, p.k_dim, p.keys[j], INTERLEAVE<T> * p.S, p.k_dim, scores + j * p.S, SCORE_STRIDE, false, &prefetcher}, rows,
            p.S);
}

// Computes sums of values, in rows of partial_size(v_dim). Each row of scores begins with its weights.
template <class T>
INLINE void sum_values(const VisiblePages<T>& p, const float* scores, int rows, float* sums,
                       Prefetcher<T>& prefetcher) {
  constexpr ptrdiff_t stride = SCORE_STRIDE * sizeof(float) / sizeof(Multiplier<T>);
  const Multiplier<T>* weights = reinterpret_cast<const Multiplier<T>*>(scores);
#ifdef RETAIN_TILES
  if (sum_by_tiles(p, weights, stride, rows, sums)) return;
#endif
  for (int j = 0; j < p.n; ++j)
    gemm<T>({weights + j * p.S, stride, p.values[j], INTERLEAVE<T> * p.v_dim, p.S, sums, partial_size(p.v_dim), j > 0,
             &prefetcher},
            rows, p.v_dim);
}

}  // namespace retain::RETAIN_ISA
