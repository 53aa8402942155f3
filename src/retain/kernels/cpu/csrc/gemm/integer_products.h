// Products of rows of integers with stored bytes, by register blocks, and the rounding that makes such rows.
#pragma once

#include "isa/prefetch.h"
#include "slots/slot_rounding.h"

namespace retain::RETAIN_ISA {

constexpr int MOST_ROWS = FEW_REGISTERS ? 2 : 4, MOST_VECTORS = FEW_REGISTERS ? 2 : 4;  // of a register block
constexpr int MOST_ROWS_WITH_TOTALS = 3;  // the same, where float32 totals take registers too
constexpr int MOST_ROWS_WITH_HALF = FEW_REGISTERS ? 3 : 6;  // with totals and half of MOST_VECTORS
constexpr int MOST_ROWS_WITH_ONE_SUM = FEW_REGISTERS ? 4 : 6;  // the same, where both numbers of a byte add to one sum

// Rows of integers.
struct IntegerRows {
  int8_t* data;
  ptrdiff_t stride;
};

// Stores a vector of x * factor as integers, and returns them.
INLINE I store_integers(int8_t* to, F x, F factor) {
  const I y = round_to_int(x * factor);
  store_bytes(to, y);
  return y;
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Calls f with n, at most MOST, as a constant.
template <int MOST, class Function>
INLINE void with_constant(int n, const Function& f) {
  if constexpr (MOST > 1)
    if (n < MOST) return with_constant<MOST - 1>(n, f);
  f(Constant<MOST>());
}

// Returns how many of n rows or vectors the next register block takes. It avoids blocks of one: they wait for the
// latency of products.
template <int MOST>
INLINE int next_block(int n) {
  return n <= MOST ? n : MOST > 2 && n % MOST == 1 ? MOST - 1 : MOST;
}

// Calls block(first row, rows, first column, vectors) for all register blocks of a product; rows and vectors are
// constants. The last vector may reach beyond the columns.
template <int ROWS, int VECTORS, class Block>
INLINE void for_blocks(int rows, int columns, const Block& block) {
  for (int c = 0, v; c < columns; c += v * WIDTH) {
    v = next_block<VECTORS>((columns - c + WIDTH - 1) / WIDTH);
    with_constant<VECTORS>(v, [&](auto vectors) {
      for (int r = 0, n; r < rows; r += n) {
        n = next_block<ROWS>(rows - r);
        with_constant<ROWS>(n, [&](auto num_rows) { block(r, num_rows, c, vectors); });
      }
    });
  }
}

#define EACH(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < n; ++i)

// Adds products of ROWS rows of `a` [depth] and VECTORS vectors of columns of bytes B [depth, stride]. Quads of rows of
// B are interleaved. A quad is LINES cache lines of what is prefetched meanwhile.
template <int LINES, int ROWS, int VECTORS, class Page>
INLINE void add_products(I (&sums)[ROWS][VECTORS], const int8_t* a, ptrdiff_t a_stride, const uint8_t* b, int depth,
                         int stride, Prefetcher<Page>& prefetcher) {
  for (int i = 0; i < depth; i += 4, b += 4 * stride) {
    prefetcher.template prefetch_during_products<LINES>();
    EACH(v, VECTORS) {
      const Bytes x = load_bytes(b + 4 * WIDTH * v);
      EACH(r, ROWS) sums[r][v] = dot(sums[r][v], x, reinterpret_cast<const char*>(a + r * a_stride + i));
    }
  }
}

// The same with bytes of two numbers, of at most 32 rows. The high ones are multiplied with what lies `second` bytes
// behind `a`. Where `high` is `low`, there are at most 16 rows. What is prefetched meanwhile has BITS for each number.
template <int BITS, int ROWS, int VECTORS, class Page>
INLINE void add_nibble_products(I (&low)[ROWS][VECTORS], I (&high)[ROWS][VECTORS], const int8_t* a, ptrdiff_t a_stride,
                                int second, const uint8_t* b, int depth, int stride, Prefetcher<Page>& prefetcher) {
  NibbleSums low_sums[ROWS][VECTORS] = {}, high_sums[ROWS][VECTORS] = {};
  const bool is_one = &low == &high;  // known to the compiler, as all of this is inline
  prefetcher.prefetch(part_of(VECTORS * WIDTH * depth * BITS / 256, PRODUCTS_PERCENT<Page>));
  _Pragma("GCC unroll 4") for (int i = 0; i < depth; i += 4, b += 4 * stride) {
    EACH(v, VECTORS) {
      const Bytes x = load_bytes(b + 4 * WIDTH * v), x_low = low_nibbles(x), x_high = high_nibbles(x);
      const char* at = reinterpret_cast<const char*>(a + i);
      EACH(r, ROWS) add_products(low_sums[r][v], x_low, at + r * a_stride);
      EACH(r, ROWS) add_products((is_one ? low_sums : high_sums)[r][v], x_high, at + r * a_stride + second);
    }
  }
  EACH(r, ROWS) EACH(v, VECTORS) {
    low[r][v] += total(low_sums[r][v]);
    if (!is_one) high[r][v] += total(high_sums[r][v]);
  }
}
#undef EACH

}  // namespace retain::RETAIN_ISA
