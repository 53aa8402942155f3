// The eight tile registers of AMX, and the sums of products that have the same bits on vectors.
//
// A tile has up to 16 rows of 64 bytes. In C += A B, row i of A holds the inputs of one result row, and row k of B holds
// inputs 2k, 2k + 1 (bfloat16) or 4k .. 4k + 3 (int8) of 16 results. Our packed weights and pages are tiles of B already.
//
// The bits of a bfloat16 product follow Intel's manual (TDPBF16PS): for each 32 inputs, the even and the odd products are
// summed from 0 in the order of the inputs, and even + odd is added to C. Inputs and sums too small for a normal float32
// count as 0; products are exact, because they are fused with the additions. `add_even` and `add_odd` let vectors do the
// same, so few rows need no tiles and get equal bits.
//
// With RETAIN_EMULATE_TILES the same operations run on memory, so that any machine can test the kernels.
#pragma once

#include "isa/simd.h"

namespace retain::RETAIN_ISA {

constexpr int TILE_ROWS = 16, TILE_ROW_BYTES = 64;
constexpr int TILE_DEPTH = 32;      // inputs of one bfloat16 product
constexpr int MIN_TILE_PRODUCT = 4;  // fewer rows are faster on vectors

INLINE float flush(float x) { return x < 0x1p-126f && x > -0x1p-126f ? 0.0f : x; }
template <int W>
INLINE typename Lanes<W>::f flush(typename Lanes<W>::f x) {
  return (x < 0x1p-126f) & (x > -0x1p-126f) ? typename Lanes<W>::f{} : x;
}

// Adds a product of bfloat16 as tiles do. Float64 holds the product, and rounds the sum so that float32 rounds it right:
// the product has 16 bits.
template <int W>
INLINE typename Lanes<W>::f add_product(typename Lanes<W>::f sum, typename Lanes<W>::f x, float a) {
  typedef double D __attribute__((vector_size(8 * W)));
  const D product = __builtin_convertvector(flush<W>(x), D) * double(flush(a));
  return flush<W>(__builtin_convertvector(__builtin_convertvector(sum, D) + product, typename Lanes<W>::f));
}

// Add the product of the even, or of the odd, elements of each pair. The emulation does not use the instruction: other
// makers' machines may round too small products.
template <int W>
INLINE typename Lanes<W>::f add_even(typename Lanes<W>::f sum, const Bf16Pairs<W>& x, const bf16* a) {
#ifndef RETAIN_EMULATE_TILES
  const bf16 pair[2] = {a[0], {0}};
  return dot<W>(sum, x, pair);
#else
  return add_product<W>(sum, (typename Lanes<W>::f)(x.bits << 16), to_float(a[0]));
#endif
}
template <int W>
INLINE typename Lanes<W>::f add_odd(typename Lanes<W>::f sum, const Bf16Pairs<W>& x, const bf16* a) {
#ifndef RETAIN_EMULATE_TILES
  const bf16 pair[2] = {{0}, a[1]};
  return dot<W>(sum, x, pair);
#else
  return add_product<W>(sum, (typename Lanes<W>::f)(x.bits & 0xffff0000), to_float(a[1]));
#endif
}

struct TileShape {
  int rows, row_bytes;
};

#ifndef RETAIN_EMULATE_TILES

// Tile numbers are template arguments, because the instructions have no other form.
class Tiles {
 public:
  ~Tiles() { asm volatile("tilerelease"); }  // else every switch of threads would save 8 KiB

  // Sets the shapes of all tiles, which become 0.
  void configure(const TileShape (&shapes)[8]) {
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {1, 0, {}, {}, {}};
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = uint16_t(shapes[i].row_bytes);
      config.rows[i] = uint8_t(shapes[i].rows);
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }

  template <int T>
  INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  INLINE void load(const void* p, ptrdiff_t stride_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride_bytes), "i"(T) : "memory");
  }
  template <int T>
  INLINE void store(void* p, ptrdiff_t stride_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride_bytes), "i"(T) : "memory");
  }
  template <int C, int A, int B>
  INLINE void dot_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  template <int C, int A, int B>
  INLINE void dot_int8() {  // signed A, unsigned B
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

#else

class Tiles {
 public:
  void configure(const TileShape (&shapes)[8]) {
    for (int i = 0; i < 8; ++i) tiles_[i] = {shapes[i], {}};
  }

  template <int T>
  void zero() {
    memset(tiles_[T].data, 0, sizeof tiles_[T].data);
  }
  template <int T>
  void load(const void* p, ptrdiff_t stride_bytes) {
    zero<T>();
    Tile& t = tiles_[T];
    for (int i = 0; i < t.shape.rows; ++i)
      memcpy(t.data[i], static_cast<const char*>(p) + i * stride_bytes, t.shape.row_bytes);
  }
  template <int T>
  void store(void* p, ptrdiff_t stride_bytes) {
    const Tile& t = tiles_[T];
    for (int i = 0; i < t.shape.rows; ++i)
      memcpy(static_cast<char*>(p) + i * stride_bytes, t.data[i], t.shape.row_bytes);
  }
  template <int C, int A, int B>
  void dot_bfloat16() {
    for (int i = 0; i < tiles_[C].shape.rows; ++i) {
      const bf16* a = reinterpret_cast<const bf16*>(tiles_[A].data[i]);
      Lanes<16>::f c, even = {}, odd = {};
      memcpy(&c, tiles_[C].data[i], sizeof c);
      for (int k = 0; k < tiles_[A].shape.row_bytes / 4; ++k) {
        const Bf16Pairs<16> b = load_pairs<16>(reinterpret_cast<const bf16*>(tiles_[B].data[k]));
        even = add_even<16>(even, b, a + 2 * k);
        odd = add_odd<16>(odd, b, a + 2 * k);
      }
      c = flush<16>(c + flush<16>(even + odd));
      memcpy(tiles_[C].data[i], &c, sizeof c);
    }
  }
  template <int C, int A, int B>
  void dot_int8() {
    for (int i = 0; i < tiles_[C].shape.rows; ++i) {
      const int8_t* a = reinterpret_cast<const int8_t*>(tiles_[A].data[i]);
      int32_t* c = reinterpret_cast<int32_t*>(tiles_[C].data[i]);
      for (int k = 0; k < tiles_[A].shape.row_bytes; ++k)
        for (int n = 0; n < 16; ++n) c[n] += a[k] * tiles_[B].data[k / 4][4 * n + k % 4];
    }
  }

 private:
  struct Tile {
    TileShape shape;
    alignas(64) uint8_t data[TILE_ROWS][TILE_ROW_BYTES];
  };
  Tile tiles_[8];
};

#endif

}  // namespace retain::RETAIN_ISA
