// The one product under both halves of attention: C [rows, columns] = (C +) A [rows, depth] B [depth, columns].
//
//   scores   A = queries   B = a page of K [D, S]   C = a row of scores for each query
//   values   A = weights   B = a page of V [S, D]   C = a sum of values for each query
//
// In bfloat16 the rows of B lie in pairs, number by number ([depth / 2, columns, 2]), as its dot product wants them, and
// A is bfloat16 too. Every number of C is one chain of sums in the order of depth, whatever the block it falls into.
#pragma once

#include <cstddef>

#include "simd.h"

namespace retain::RETAIN_ISA {

template <class T>
constexpr int DEEP = 1;  // how many numbers of depth lie together
template <>
inline constexpr int DEEP<bf16> = 2;

template <class T>
struct Product {
  const T* a;
  ptrdiff_t lda;
  const T* b;  // numbers of one depth, or of a pair of depths, are ldb apart
  ptrdiff_t ldb;
  int depth;
  float* c;
  ptrdiff_t ldc;
  bool add;         // to what C holds
  ptrdiff_t ahead;  // bytes from B to the page that will be wanted next
};

constexpr int BLOCK_ROWS = 6;
constexpr int BLOCK_VECTORS = WIDTH == 16 ? 4 : 2;  // 32 vector registers with AVX-512, 16 elsewhere

template <int W>
INLINE typename Lanes<W>::f load_deep(const float* p) {
  return load<W>(p);
}
template <int W>
INLINE Pairs<W> load_deep(const bf16* p) {
  return load_pairs<W>(p);
}
template <int W>
INLINE typename Lanes<W>::f dot(typename Lanes<W>::f sum, typename Lanes<W>::f x, const float* a) {
  return sum + a[0] * x;
}

// One block, its sums in registers: each vector of B is loaded once for all its rows.
template <class T, int W, int VECTORS, int ROWS>
INLINE void block(const Product<T>& p) {
#define EACH(i, n) _Pragma("GCC unroll 12") for (int i = 0; i < n; ++i)
  typename Lanes<W>::f sum[ROWS][VECTORS] = {};
  decltype(load_deep<W>(p.b)) x[VECTORS];
  if (p.add) EACH(r, ROWS) EACH(v, VECTORS) sum[r][v] = load<W>(p.c + r * p.ldc + v * W);
  const T* b = p.b;
  for (int i = 0; i < p.depth; i += DEEP<T>, b += p.ldb) {
    // Into the second level: the first has too few requests in flight to keep up with the memory.
    EACH(line, int(sizeof(T) * DEEP<T> * W * VECTORS + 63) / 64)
    __builtin_prefetch(reinterpret_cast<const char*>(b) + p.ahead + 64 * line, 0, 2);
    EACH(v, VECTORS) x[v] = load_deep<W>(b + DEEP<T> * v * W);
    EACH(r, ROWS) EACH(v, VECTORS) sum[r][v] = dot<W>(sum[r][v], x[v], p.a + r * p.lda + i);
  }
  EACH(r, ROWS) EACH(v, VECTORS) store<W>(p.c + r * p.ldc + v * W, sum[r][v]);
#undef EACH
}

template <class T, int W, int VECTORS, int ROWS>
void last_rows(const Product<T>& p, int rows) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS)
      block<T, W, VECTORS, ROWS>(p);
    else
      last_rows<T, W, VECTORS, ROWS - 1>(p, rows);
  }
}

template <class T, int W, int VECTORS>
INLINE void strip(Product<T> p, int rows) {
  for (; rows >= BLOCK_ROWS; rows -= BLOCK_ROWS) {
    block<T, W, VECTORS, BLOCK_ROWS>(p);
    p.a += BLOCK_ROWS * p.lda;
    p.c += BLOCK_ROWS * p.ldc;
    p.ahead = 0;  // the first block has asked for the next page
  }
  last_rows<T, W, VECTORS, BLOCK_ROWS - 1>(p, rows);
}

template <class T>
void multiply(Product<T> p, int rows, int columns) {
  int c = 0;
  auto advance = [&](int by) {
    c += by;
    p.b += DEEP<T> * by;
    p.c += by;
  };
  if constexpr (BLOCK_VECTORS >= 4)
    for (; columns - c >= 4 * WIDTH; advance(4 * WIDTH)) strip<T, WIDTH, 4>(p, rows);
  for (; columns - c >= 2 * WIDTH; advance(2 * WIDTH)) strip<T, WIDTH, 2>(p, rows);
  for (; columns - c >= WIDTH; advance(WIDTH)) strip<T, WIDTH, 1>(p, rows);
  if constexpr (WIDTH > 8)  // pages are multiples of 16 slots, head dims of 8
    if (columns - c == 8) strip<T, 8, 1>(p, rows);
}

}  // namespace retain::RETAIN_ISA
