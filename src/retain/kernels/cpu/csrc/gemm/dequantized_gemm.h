// Products of quantized weights and activations that are both rounded to bfloat16: panels of two tiles are unpacked to
// bfloat16, and multiplied with all rows of a block. A bfloat16 copy of the weights gives the same bits.
//
// On AMX an exact sum of integers leaves its tile for every scale, to be scaled and added on vectors. Here sums stay in
// tiles over a panel (log/cpu-speed.md). Elsewhere integers are faster.
#pragma once

#include "gemm/packed_gemm.h"
#ifdef RETAIN_TILES
#include "gemm/tile_gemm.h"
#endif

namespace retain::RETAIN_ISA {

constexpr int PANEL_INPUTS = 256;  // 16 KiB of weights, which stay in L1 beside 16 rows of activations
constexpr int PANEL_OUT = PANEL_TILES * TILE_OUT;
constexpr int STRIP_ROWS = 32;
#ifdef RETAIN_TILES
static_assert(STRIP_ROWS == 2 * TILE_ROWS, "a strip is two tiles of rows");
#endif

// Returns pairs of the nearest bfloat16 of finite numbers: those of `even` are the lower halves.
INLINE Lanes<WIDTH>::u to_pairs(F even, F odd) {
#ifdef __AVX512BF16__
  if constexpr (WIDTH == 16) {
    alignas(64) static constexpr uint16_t PLACES[32] = {0,  16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8,  24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    return (Lanes<WIDTH>::u)_mm512_permutexvar_epi16(_mm512_load_si512(PLACES), halves);
  }
#endif
  return round_to_upper_half(even) >> 16 | (round_to_upper_half(odd) & 0xffff0000);
}

// Unpacks n groups of a tile to bfloat16, [n * 16][16][2].
template <WeightFormat FORMAT>
void dequantize_groups(const char* group, int n, bf16* out) {
  constexpr int PARTS = scales_per_group(FORMAT), STEPS = QUANT_GROUP / (has_nibbles(FORMAT) ? 8 : 4) / PARTS;
  for (int g = 0; g < n; ++g, group += group_bytes(FORMAT), out += QUANT_GROUP * TILE_OUT)
    for (int vector = 0; vector < TILE_VECTORS; ++vector) {
      const uint8_t* numbers = reinterpret_cast<const uint8_t*>(group) + 4 * vector * WIDTH;
      const float16* scales =
          reinterpret_cast<const float16*>(group + group_number_bytes(FORMAT)) + vector * WIDTH;
      F scale = {}, shift = {};
      if constexpr (has_shift(FORMAT)) shift = load<WIDTH>(scales + TILE_OUT);
      auto store_four = [&](const Bytes& x, int input) __attribute__((always_inline)) {
        Lanes<WIDTH>::u words;
        memcpy(&words, &x, sizeof words);
        auto number = [&](int i) __attribute__((always_inline)) {
          const I q = (I)(words >> 8 * i & 0xff) - excess(FORMAT);
          return __builtin_convertvector(q, F) * scale + shift;
        };
        bf16* pairs = out + input * TILE_OUT + 2 * vector * WIDTH;
        for (int i = 0; i < 4; i += 2, pairs += 2 * TILE_OUT) {
          const auto bits = to_pairs(number(i), number(i + 1));
          memcpy(pairs, &bits, sizeof bits);
        }
      };
      for (int part = 0; part < PARTS; ++part) {
        scale = load<WIDTH>(scales + part * TILE_OUT);
        for (int i = part * STEPS; i < (part + 1) * STEPS; ++i) {
          if constexpr (has_nibbles(FORMAT)) {
            Bytes low, high;
            unpack_numbers<FORMAT>(numbers, i, low, high);
            store_four(low, 8 * i);
            store_four(high, 8 * i + 4);
          } else {
            store_four(load_bytes(numbers + i * STEP_BYTES), 4 * i);
          }
        }
      }
    }
}

INLINE void dequantize(WeightFormat format, const char* groups, int n, bf16* out) {
  switch (format) {
    case WeightFormat::float32:
    case WeightFormat::bfloat16: return;
    case WeightFormat::int8: return dequantize_groups<WeightFormat::int8>(groups, n, out);
    case WeightFormat::int4: return dequantize_groups<WeightFormat::int4>(groups, n, out);
    case WeightFormat::iq4: return dequantize_groups<WeightFormat::iq4>(groups, n, out);
    case WeightFormat::mxfp4: return dequantize_groups<WeightFormat::mxfp4>(groups, n, out);
    case WeightFormat::int5: return dequantize_groups<WeightFormat::int5>(groups, n, out);
    case WeightFormat::int6: return dequantize_groups<WeightFormat::int6>(groups, n, out);
    case WeightFormat::nvfp4: return dequantize_groups<WeightFormat::nvfp4>(groups, n, out);
  }
}

// Adds the products of the tiles of a panel with ROWS rows to their sums [ROWS][PANEL_OUT].
template <int TILES, int ROWS>
INLINE void add_products_of_rows(const Bfloat16Args& p, float* sums) {
  for (int vector = 0; vector < TILE_VECTORS; ++vector) {
    F sum[TILES][ROWS];
    float* own = sums + vector * WIDTH;
    for (int r = 0; r < ROWS; ++r)
      for (int t = 0; t < TILES; ++t) sum[t][r] = load<WIDTH>(own + r * PANEL_OUT + t * TILE_OUT);
    dot_bfloat16(p, vector, sum);
    for (int r = 0; r < ROWS; ++r)
      for (int t = 0; t < TILES; ++t) store<WIDTH>(own + r * PANEL_OUT + t * TILE_OUT, sum[t][r]);
  }
}

template <int TILES, int ROWS>
void add_products(Bfloat16Args p, int n, float* sums) {
  for (; n >= ROWS; n -= ROWS, p.rows += ROWS * p.row_stride, sums += ROWS * PANEL_OUT)
    add_products_of_rows<TILES, ROWS>(p, sums);
  if constexpr (ROWS > 1)
    if (n > 0) add_products<TILES, ROWS / 2>(p, n, sums);
}

#ifdef RETAIN_TILES
INLINE void add_products_by_tiles(Tiles& tiles, const Bfloat16Args& p, int num_tiles, int n, float* sums) {
  int configured = 0;
  for (int r = 0; r < n; r += STRIP_ROWS) {
    const TileStrip strip(n - r);
    if (strip.rows() != configured) configure_bfloat16(tiles, strip);
    configured = strip.rows();
    const TileOperands operands = {reinterpret_cast<const bf16*>(p.rows + r * p.row_stride),
                                   reinterpret_cast<const bf16*>(p.tile)};
    tile_gemm(tiles, strip, {&operands, 1, p.depth, p.row_stride / 2, 2 * TILE_OUT, p.tile_stride / 2,
                             sums + r * PANEL_OUT, PANEL_OUT, true}, num_tiles * TILE_OUT);
  }
}
#endif

INLINE void store_sums(const PackedWeight& w, int t, const float* sums, int rows, OutputView out) {
  for (; rows > 0; rows -= STRIP_ROWS, sums += STRIP_ROWS * PANEL_OUT, out = skip_rows(out, STRIP_ROWS)) {
    const int n = rows < STRIP_ROWS ? rows : STRIP_ROWS;
    F sum[STRIP_ROWS];
    for (int vector = 0; vector < TILE_VECTORS; ++vector) {
      for (int r = 0; r < n; ++r) sum[r] = load<WIDTH>(sums + r * PANEL_OUT + vector * WIDTH);
      store_outputs(w, t * TILE_OUT + vector * WIDTH, out, sum, n);
    }
  }
}

// Computes output tiles begin .. end - 1 for n prepared rows.
inline void gemm_dequantized(const PackedWeight& w, int begin, int end, const char* rows, int n,
                             const OutputView& out) {
  constexpr int MAX_ROWS = max_rows(WeightFormat::bfloat16, PANEL_TILES);
  constexpr int64_t TILE_STRIDE = PANEL_INPUTS * TILE_OUT * sizeof(bf16);
  alignas(64) bf16 panel[PANEL_TILES][PANEL_INPUTS * TILE_OUT];
  alignas(64) float sums[MAX_BLOCK_ROWS * PANEL_OUT];
#ifdef RETAIN_TILES
  Tiles tiles;
#endif
  for (int row = 0; row < n; row += MAX_BLOCK_ROWS) {
    const int block = n - row < MAX_BLOCK_ROWS ? n - row : MAX_BLOCK_ROWS;
    for (int t = begin; t < end; t += PANEL_TILES) {
      const int num_tiles = end - t < PANEL_TILES ? end - t : PANEL_TILES;
      memset(sums, 0, size_t(block) * PANEL_OUT * sizeof(float));
      for (int first = 0; first < w.in; first += PANEL_INPUTS) {
        const int inputs = w.in - first < PANEL_INPUTS ? w.in - first : PANEL_INPUTS;
        for (int i = 0; i < num_tiles; ++i) {
          const char* tile = w.data + (t + i) * w.tile_bytes();
          dequantize(w.format, tile + first / QUANT_GROUP * group_bytes(w.format), inputs / QUANT_GROUP, panel[i]);
        }
        const char* a = rows + row * row_bytes(w) + first * sizeof(Multiplier<bf16>);
        const Bfloat16Args p = {reinterpret_cast<const char*>(panel), TILE_STRIDE, inputs, a, row_bytes(w)};
#ifdef RETAIN_TILES
        if (n >= MIN_TILE_PRODUCT) {
          add_products_by_tiles(tiles, p, num_tiles, block, sums);
          continue;
        }
#endif
        num_tiles == 2 ? add_products<2, MAX_ROWS>(p, block, sums) : add_products<1, MAX_ROWS>(p, block, sums);
      }
      for (int i = 0; i < num_tiles; ++i) store_sums(w, t + i, sums + i * TILE_OUT, block, skip_rows(out, row));
    }
  }
}

}  // namespace retain::RETAIN_ISA
