// Products on tiles: C [rows, columns] = A [rows, depth] B [depth, columns] in bfloat16, for attention and for packed
// weights. A block of 2 x 2 tiles of C takes two tiles of A and two of B for every 32 inputs, so each is used twice.
#pragma once

#include "gemm/tiles.h"

namespace retain::RETAIN_ISA {

// One part of the depth. Parts follow each other in the sums.
struct TileOperands {
  const bf16 *a, *b;
};

struct TileGemm {
  const TileOperands* parts;
  int num_parts, depth;  // of each part, a multiple of TILE_DEPTH
  ptrdiff_t lda;         // elements between rows of A
  ptrdiff_t ldb;         // elements between pairs of rows of B
  ptrdiff_t column_step;  // elements of B between tiles of 16 columns
  float* c;
  ptrdiff_t ldc;
  bool accumulate = false;  // into C
};

// Rows of a strip: those of the first and of the second tile of A.
struct TileStrip {
  int first, second;

  INLINE explicit TileStrip(int rows)
      : first(rows < TILE_ROWS ? rows : TILE_ROWS),
        second(rows <= TILE_ROWS ? 0 : rows < 2 * TILE_ROWS ? rows - TILE_ROWS : TILE_ROWS) {}
  INLINE int rows() const { return first + second; }
};

// Tiles 0 .. 3 are C, 4 and 5 are A, 6 and 7 are B.
INLINE void configure_bfloat16(Tiles& tiles, TileStrip strip) {
  const TileShape first = {strip.first, TILE_ROW_BYTES}, b = {TILE_ROWS, TILE_ROW_BYTES};
  const TileShape second = {strip.second ? strip.second : 1, TILE_ROW_BYTES};
  tiles.configure({first, first, second, second, first, second, b, b});
}

template <bool TWO_ROWS, bool TWO_COLUMNS>
INLINE void tile_block(Tiles& tiles, const TileGemm& p, int column) {
  float* c = p.c + column;
  if (p.accumulate) {
    tiles.load<0>(c, 4 * p.ldc);
    if (TWO_COLUMNS) tiles.load<1>(c + TILE_ROWS, 4 * p.ldc);
    if (TWO_ROWS) tiles.load<2>(c + TILE_ROWS * p.ldc, 4 * p.ldc);
    if (TWO_ROWS && TWO_COLUMNS) tiles.load<3>(c + TILE_ROWS * p.ldc + TILE_ROWS, 4 * p.ldc);
  } else {
    tiles.zero<0>();
    if (TWO_COLUMNS) tiles.zero<1>();
    if (TWO_ROWS) tiles.zero<2>();
    if (TWO_ROWS && TWO_COLUMNS) tiles.zero<3>();
  }
  for (int i = 0; i < p.num_parts; ++i) {
    const bf16 *a = p.parts[i].a, *b = p.parts[i].b + column / TILE_ROWS * p.column_step;
    for (int k = 0; k < p.depth; k += TILE_DEPTH, a += TILE_DEPTH, b += TILE_DEPTH / 2 * p.ldb) {
      tiles.load<4>(a, 2 * p.lda);
      tiles.load<6>(b, 2 * p.ldb);
      tiles.dot_bfloat16<0, 4, 6>();
      if (TWO_COLUMNS) {
        tiles.load<7>(b + p.column_step, 2 * p.ldb);
        tiles.dot_bfloat16<1, 4, 7>();
      }
      if (TWO_ROWS) {
        tiles.load<5>(a + TILE_ROWS * p.lda, 2 * p.lda);
        tiles.dot_bfloat16<2, 5, 6>();
        if (TWO_COLUMNS) tiles.dot_bfloat16<3, 5, 7>();
      }
    }
  }
  tiles.store<0>(c, 4 * p.ldc);
  if (TWO_COLUMNS) tiles.store<1>(c + TILE_ROWS, 4 * p.ldc);
  if (TWO_ROWS) tiles.store<2>(c + TILE_ROWS * p.ldc, 4 * p.ldc);
  if (TWO_ROWS && TWO_COLUMNS) tiles.store<3>(c + TILE_ROWS * p.ldc + TILE_ROWS, 4 * p.ldc);
}

// Computes all columns, a multiple of 16, for a strip of rows that the tiles are configured for.
INLINE void tile_gemm(Tiles& tiles, TileStrip strip, const TileGemm& p, int columns) {
  int column = 0;
  for (; columns - column >= 2 * TILE_ROWS; column += 2 * TILE_ROWS)
    strip.second ? tile_block<true, true>(tiles, p, column) : tile_block<false, true>(tiles, p, column);
  if (column < columns)
    strip.second ? tile_block<true, false>(tiles, p, column) : tile_block<false, false>(tiles, p, column);
}

}  // namespace retain::RETAIN_ISA
