// The matrix product inside attention: C [rows, columns] = (C +) A [rows, depth] B [depth, columns].
//
//   scores   A = queries   B = a page of K [D, S]   C = a row of scores for each query
//   values   A = weights   B = a page of V [S, D]   C = a sum of values for each query
//
// In bfloat16 pairs of B's rows are interleaved, [depth / 2, columns, 2], for the pairwise dot product; A is bfloat16
// too. Each element of C is one chain of sums in the order of depth. So its bits do not depend on the register block
// that computes it.
#pragma once

#include <cstddef>

#include "simd.h"

namespace retain::RETAIN_ISA {

template <class T>
constexpr int INTERLEAVE = 1;  // rows of B whose elements are interleaved
template <>
inline constexpr int INTERLEAVE<bf16> = 2;

template <class T>
struct GemmArgs {
  const T* a;
  ptrdiff_t lda;
  const T* b;
  ptrdiff_t ldb;  // elements between rows of B, or between pairs of rows
  int depth;
  float* c;
  ptrdiff_t ldc;
  bool accumulate;           // into C
  ptrdiff_t prefetch_bytes;  // from B to the page that is read next
};

constexpr int BLOCK_ROWS = 6;
constexpr int BLOCK_VECTORS = WIDTH == 16 ? 4 : 2;  // 32 vector registers with AVX-512, 16 elsewhere

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
  for (int i = 0; i < p.depth; i += INTERLEAVE<T>, b += p.ldb) {
    // Prefetch into L2: L1 allows too few outstanding misses to saturate memory bandwidth.
    EACH(line, int(sizeof(T) * INTERLEAVE<T> * W * VECTORS + 63) / 64)
    __builtin_prefetch(reinterpret_cast<const char*>(b) + p.prefetch_bytes + 64 * line, 0, 2);
    EACH(v, VECTORS) x[v] = load_interleaved<W>(b + INTERLEAVE<T> * v * W);
    EACH(r, ROWS) EACH(v, VECTORS) sum[r][v] = dot<W>(sum[r][v], x[v], p.a + r * p.lda + i);
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
  for (; rows >= BLOCK_ROWS; rows -= BLOCK_ROWS) {
    register_block<T, W, VECTORS, BLOCK_ROWS>(p);
    p.a += BLOCK_ROWS * p.lda;
    p.c += BLOCK_ROWS * p.ldc;
    p.prefetch_bytes = 0;  // the first block has prefetched the next page
  }
  remaining_rows<T, W, VECTORS, BLOCK_ROWS - 1>(p, rows);
}

template <class T>
void gemm(GemmArgs<T> p, int rows, int columns) {
  int c = 0;
  auto advance = [&](int n) {
    c += n;
    p.b += INTERLEAVE<T> * n;
    p.c += n;
  };
  if constexpr (BLOCK_VECTORS >= 4)
    for (; columns - c >= 4 * WIDTH; advance(4 * WIDTH)) column_strip<T, WIDTH, 4>(p, rows);
  for (; columns - c >= 2 * WIDTH; advance(2 * WIDTH)) column_strip<T, WIDTH, 2>(p, rows);
  for (; columns - c >= WIDTH; advance(WIDTH)) column_strip<T, WIDTH, 1>(p, rows);
  if constexpr (WIDTH > 8)  // pages are multiples of 16 slots, head dims of 8
    if (columns - c == 8) column_strip<T, 8, 1>(p, rows);
}

}  // namespace retain::RETAIN_ISA
