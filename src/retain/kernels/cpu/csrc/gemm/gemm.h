// The matrix product inside attention: C [rows, columns] = (C +) A [rows, depth] B [depth, columns].
//
//   scores   A = queries   B = a page of K [D, S]   C = a row of scores for each query
//   values   A = weights   B = a page of V [S, D]   C = a sum of values for each query
//
// In bfloat16 pairs of B's rows are interleaved, [depth / 2, columns, 2], for the pairwise dot product. A has the type
// `Multiplier` (simd.h). Each element of C is one chain of sums in the order of depth. So its bits do not depend on the
// register block that computes it. With RETAIN_TILES bfloat16 is summed as tiles do (tiles.h), in chunks of 32 rows of B.
#pragma once

#include <cstddef>

#include "isa/prefetch.h"
#ifdef RETAIN_TILES
#include "gemm/tile_gemm.h"
#endif

namespace retain::RETAIN_ISA {

template <class T>
constexpr int INTERLEAVE = 1;  // rows of B whose elements are interleaved
template <>
inline constexpr int INTERLEAVE<bf16> = 2;

template <class T>
struct GemmArgs {
  const Multiplier<T>* a;
  ptrdiff_t lda;
  const T* b;
  ptrdiff_t ldb;  // elements between rows of B, or between pairs of rows
  int depth;
  float* c;
  ptrdiff_t ldc;
  bool accumulate;  // into C
  Prefetcher<T>* prefetcher;
};

template <class T>
constexpr bool SUMS_LIKE_TILES = HAS_TILES && sizeof(T) == 2;  // such sums take three registers each
template <class T>
constexpr int BLOCK_ROWS = SUMS_LIKE_TILES<T> ? 3 : 6;
template <class T>
constexpr int BLOCK_VECTORS = FEW_REGISTERS || SUMS_LIKE_TILES<T> ? 2 : 4;

template <int W>
INLINE typename Lanes<W>::f load_interleaved(const float* p) {
  return load<W>(p);
}
template <int W>
INLINE Bf16Pairs<W> load_interleaved(const bf16* p) {
  return load_pairs<W>(p);
}
template <int W>
INLINE typename Lanes<W>::f dot(typename Lanes<W>::f sum, typename Lanes<W>::f x, const float* a) {
  return sum + a[0] * x;
}

// Computes ROWS x VECTORS vectors of C in registers. Each vector of B is loaded once for all rows.
template <class T, int W, int VECTORS, int ROWS>
INLINE void register_block(const GemmArgs<T>& p) {
#define EACH(i, n) _Pragma("GCC unroll 12") for (int i = 0; i < n; ++i)
  typename Lanes<W>::f sum[ROWS][VECTORS] = {};
  decltype(load_interleaved<W>(p.b)) x[VECTORS];
  if (p.accumulate) EACH(r, ROWS) EACH(v, VECTORS) sum[r][v] = load<W>(p.c + r * p.ldc + v * W);
  const T* b = p.b;
  auto load_row = [&] {
    p.prefetcher->template prefetch_during_products<int(sizeof(T) * INTERLEAVE<T> * W * VECTORS + 63) / 64>();
    EACH(v, VECTORS) x[v] = load_interleaved<W>(b + INTERLEAVE<T> * v * W);
    b += p.ldb;
  };
  if constexpr (SUMS_LIKE_TILES<T>) {
#ifdef RETAIN_TILES
    for (int begin = 0; begin < p.depth; begin += TILE_DEPTH) {
      typename Lanes<W>::f even[ROWS][VECTORS] = {}, odd[ROWS][VECTORS] = {};
      const int end = begin + TILE_DEPTH < p.depth ? begin + TILE_DEPTH : p.depth;
      for (int i = begin; i < end; i += 2) {
        load_row();
        EACH(r, ROWS) EACH(v, VECTORS) even[r][v] = add_even<W>(even[r][v], x[v], p.a + r * p.lda + i);
        EACH(r, ROWS) EACH(v, VECTORS) odd[r][v] = add_odd<W>(odd[r][v], x[v], p.a + r * p.lda + i);
      }
      EACH(r, ROWS) EACH(v, VECTORS) sum[r][v] = flush<W>(sum[r][v] + flush<W>(even[r][v] + odd[r][v]));
    }
#endif
  } else {
    for (int i = 0; i < p.depth; i += INTERLEAVE<T>) {
      load_row();
      EACH(r, ROWS) EACH(v, VECTORS) sum[r][v] = dot<W>(sum[r][v], x[v], p.a + r * p.lda + i);
    }
  }
  EACH(r, ROWS) EACH(v, VECTORS) store<W>(p.c + r * p.ldc + v * W, sum[r][v]);
#undef EACH
}

template <class T, int W, int VECTORS, int ROWS>
void remaining_rows(const GemmArgs<T>& p, int rows) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS)
      register_block<T, W, VECTORS, ROWS>(p);
    else
      remaining_rows<T, W, VECTORS, ROWS - 1>(p, rows);
  }
}

template <class T, int W, int VECTORS>
INLINE void column_strip(GemmArgs<T> p, int rows) {
  constexpr int ROWS = BLOCK_ROWS<T>;
  for (; rows >= ROWS; rows -= ROWS) {
    register_block<T, W, VECTORS, ROWS>(p);
    p.a += ROWS * p.lda;
    p.c += ROWS * p.ldc;
  }
  remaining_rows<T, W, VECTORS, ROWS - 1>(p, rows);
}

template <class T>
void gemm(GemmArgs<T> p, int rows, int columns) {
  int c = 0;
  auto advance = [&](int n) {
    c += n;
    p.b += INTERLEAVE<T> * n;
    p.c += n;
  };
  if constexpr (BLOCK_VECTORS<T> >= 4)
    for (; columns - c >= 4 * WIDTH; advance(4 * WIDTH)) column_strip<T, WIDTH, 4>(p, rows);
  for (; columns - c >= 2 * WIDTH; advance(2 * WIDTH)) column_strip<T, WIDTH, 2>(p, rows);
  for (; columns - c >= WIDTH; advance(WIDTH)) column_strip<T, WIDTH, 1>(p, rows);
  if constexpr (WIDTH > 8)  // pages are multiples of 16 slots, head dims of 8
    if (columns - c == 8) column_strip<T, 8, 1>(p, rows);
}

}  // namespace retain::RETAIN_ISA
