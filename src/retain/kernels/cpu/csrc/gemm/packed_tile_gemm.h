// Products with packed weights on tiles. A packed tile of 16 outputs is a tile of B for every 32 inputs.
//
// bfloat16: sums stay in tiles. Quantized weights: the sum of the products that share a scale is an exact integer; it
// leaves the tile and is scaled and added on vectors, in the order of packed_gemm.h, so the bits are the same. The next
// product is issued before the last one is added.
#pragma once

#include "gemm/packed_gemm.h"
#include "gemm/tile_gemm.h"

namespace retain::RETAIN_ISA {

static_assert(WIDTH == TILE_OUT, "a vector holds one number of each output of a tile");

constexpr int BLOCK_ACTIVATION_BYTES = 1 << 19;  // activations of a block stay in L2 while all outputs use them
constexpr int PANEL_GROUPS = 64;                 // groups that are unpacked at a time

// Calls f(first row, rows) for blocks of rows.
template <class F>
INLINE void for_each_row_block(const PackedWeight& w, int rows, int max_rows, F f) {
  const int fitting = int(BLOCK_ACTIVATION_BYTES / row_bytes(w)) / (2 * TILE_ROWS) * (2 * TILE_ROWS);
  const int block = fitting < 2 * TILE_ROWS ? 2 * TILE_ROWS : fitting < max_rows ? fitting : max_rows;
  for (int r = 0; r < rows; r += block) f(r, rows - r < block ? rows - r : block);
}

// ---- bfloat16 ---------------------------------------------------------------------------------------------------

INLINE void bfloat16_strip(Tiles& tiles, const PackedWeight& w, int t, int num_tiles, const char* rows,
                           TileStrip strip, const OutputView& out) {
  alignas(64) float c[2 * TILE_ROWS][2 * TILE_OUT];
  const TileOperands operands = {reinterpret_cast<const bf16*>(rows),
                                 reinterpret_cast<const bf16*>(w.data + t * w.tile_bytes())};
  const ptrdiff_t column_step = w.tile_bytes() / 2;
  tile_gemm(tiles, strip, {&operands, 1, w.in, row_bytes(w) / 2, 2 * TILE_OUT, column_step, c[0], 2 * TILE_OUT},
            num_tiles * TILE_OUT);
  for (int i = 0; i < num_tiles; ++i) {
    F sum[2 * TILE_ROWS];
    for (int r = 0; r < strip.rows(); ++r) sum[r] = load<WIDTH>(c[r] + i * TILE_OUT);
    store_outputs(w, (t + i) * TILE_OUT, out, sum, strip.rows());
  }
}

INLINE void gemm_bfloat16(const PackedWeight& w, int begin, int end, const char* rows, int n, const OutputView& out) {
  for_each_row_block(w, n, n, [&](int first, int block) {
    Tiles tiles;
    for (int done = 0; done < block;) {  // strips of equal shape share a configuration
      const TileStrip strip(block - done);
      const int strips = strip.rows() == 2 * TILE_ROWS ? (block - done) / strip.rows() : 1;
      configure_bfloat16(tiles, strip);
      for (int t = begin; t < end; t += 2)
        for (int i = 0; i < strips; ++i) {
          const int row = first + done + i * strip.rows();
          bfloat16_strip(tiles, w, t, end - t > 1 ? 2 : 1, rows + row * row_bytes(w), strip,
                         skip_rows(out, row));
        }
      done += strips * strip.rows();
    }
  });
}

// ---- quantized weights ------------------------------------------------------------------------------------------

// Groups begin .. end - 1 of one tile of weights.
struct GroupPanel {
  const char* scales;  // of the first group; the others follow in group_bytes
  const char* numbers;  // [8][16][4] of the first group
  ptrdiff_t number_step;
  int begin, end;
};

template <WeightFormat FORMAT>
INLINE void unpack_panel(const char* groups, int n, char* panel) {
  for (int g = 0; g < n; ++g, groups += group_bytes(FORMAT), panel += group_number_bytes(WeightFormat::int8))
    for (int i = 0; i < 4; ++i) {
      Bytes low, high;
      unpack_numbers<FORMAT>(reinterpret_cast<const uint8_t*>(groups), i, low, high);
      memcpy(panel + 128 * i, &low, 64);
      memcpy(panel + 128 * i + 64, &high, 64);
    }
}

// Tiles I, 2 + I and 4 + I are C, A and B of a part, for I = 0 and 1. A part is the inputs that share a scale: a group,
// or a half of it.
template <WeightFormat FORMAT>
INLINE void configure_parts(Tiles& tiles, int rows) {
  constexpr int INPUTS = QUANT_GROUP / scales_per_group(FORMAT);
  const TileShape a = {rows, INPUTS}, b = {INPUTS / 4, TILE_ROW_BYTES}, c = {rows, TILE_ROW_BYTES};
  tiles.configure({c, c, a, a, b, b, c, c});
}

template <WeightFormat FORMAT, int I>
INLINE void multiply_part(Tiles& tiles, const GroupPanel& p, int part, const char* rows, int64_t stride, int32_t* c) {
  constexpr int PARTS = scales_per_group(FORMAT);
  tiles.zero<I>();
  tiles.load<2 + I>(rows + part * (QUANT_GROUP / PARTS), stride);
  tiles.load<4 + I>(p.numbers + (part - p.begin * PARTS) * (p.number_step / PARTS), TILE_ROW_BYTES);
  tiles.dot_int8<I, 2 + I, 4 + I>();
  tiles.store<I>(c, TILE_ROW_BYTES);
}

template <WeightFormat FORMAT, int ROWS>
INLINE void add_part(const GroupPanel& p, int part, const ActivationGroup* groups, int64_t stride, const int32_t* c,
                     F (&sum)[ROWS]) {
  constexpr int PARTS = scales_per_group(FORMAT);
  const int g = part / PARTS, half = part % PARTS;
  const char* tile_scales = p.scales + (g - p.begin) * group_bytes(FORMAT);
  const float16* scales = reinterpret_cast<const float16*>(tile_scales);
  const F scale = load<WIDTH>(scales + half * TILE_OUT);
  F shift = {};
  if constexpr (has_shift(FORMAT)) shift = load<WIDTH>(scales + TILE_OUT);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    const char* row_group = reinterpret_cast<const char*>(groups + g) + r * stride;
    const ActivationGroup& x = *reinterpret_cast<const ActivationGroup*>(row_group);
    I group_sum = load_ints(c + r * TILE_OUT);
    if constexpr (!has_shift(FORMAT)) group_sum += splat(offset_of<FORMAT>(x, half));
    sum[r] += __builtin_convertvector(group_sum, F) * (scale * x.scale);
    if constexpr (has_shift(FORMAT)) sum[r] += shift * x.sum;
  }
}

// Adds the products of a panel to the sums of ROWS rows. Rows behind the last one are computed from what lies there.
template <WeightFormat FORMAT, int ROWS>
INLINE void add_panel(Tiles& tiles, const PackedWeight& w, const GroupPanel& p, const char* rows, F* sums) {
  alignas(64) int32_t c[2][ROWS * TILE_OUT] = {};
  const int64_t stride = row_bytes(w);
  const ActivationGroup* groups = groups_of(w, rows);
  F sum[ROWS];
  for (int r = 0; r < ROWS; ++r) sum[r] = sums[r];
  const int begin = p.begin * scales_per_group(FORMAT), end = p.end * scales_per_group(FORMAT);
  multiply_part<FORMAT, 0>(tiles, p, begin, rows, stride, c[0]);
  for (int i = begin; i < end; i += 2) {
    if (i + 1 < end) multiply_part<FORMAT, 1>(tiles, p, i + 1, rows, stride, c[1]);
    add_part<FORMAT>(p, i, groups, stride, c[0], sum);
    if (i + 1 == end) break;
    if (i + 2 < end) multiply_part<FORMAT, 0>(tiles, p, i + 2, rows, stride, c[0]);
    add_part<FORMAT>(p, i + 1, groups, stride, c[1], sum);
  }
  for (int r = 0; r < ROWS; ++r) sums[r] = sum[r];
}

template <WeightFormat FORMAT>
INLINE void gemm_groups(const PackedWeight& w, int begin, int end, const char* rows, int n, const OutputView& out) {
  alignas(64) char unpacked[PANEL_GROUPS * group_number_bytes(WeightFormat::int8)];
  F sums[MAX_BLOCK_ROWS];
  Tiles tiles;
  int configured = 0;
  auto configure = [&](int strip) {
    if (strip == configured) return;
    configure_parts<FORMAT>(tiles, strip);
    configured = strip;
  };
  for_each_row_block(w, n, MAX_BLOCK_ROWS, [&](int first, int block) {
    for (int t = begin; t < end; ++t) {
      const char* tile = w.data + t * w.tile_bytes();
      for (int r = 0; r < block; ++r) sums[r] = F{};
      for (int g = 0; g < w.num_groups(); g += PANEL_GROUPS) {
        const char* groups = tile + g * group_bytes(FORMAT);
        const int panel_end = g + PANEL_GROUPS < w.num_groups() ? g + PANEL_GROUPS : w.num_groups();
        GroupPanel panel = {groups + group_number_bytes(FORMAT), groups, group_bytes(FORMAT), g, panel_end};
        if constexpr (has_nibbles(FORMAT)) {
          unpack_panel<FORMAT>(groups, panel_end - g, unpacked);
          panel.numbers = unpacked, panel.number_step = group_number_bytes(WeightFormat::int8);
        }
        for (int r = 0; r < block; r += TILE_ROWS) {
          const int strip = block - r < TILE_ROWS ? block - r : TILE_ROWS;
          const char* a = rows + (first + r) * row_bytes(w);
          configure(strip);
          if (strip > 12) add_panel<FORMAT, 16>(tiles, w, panel, a, sums + r);
          else if (strip > 8) add_panel<FORMAT, 12>(tiles, w, panel, a, sums + r);
          else if (strip > 4) add_panel<FORMAT, 8>(tiles, w, panel, a, sums + r);
          else add_panel<FORMAT, 4>(tiles, w, panel, a, sums + r);
        }
      }
      store_outputs(w, t * TILE_OUT, skip_rows(out, first), sums, block);
    }
  });
}

// Returns false where vectors must compute the product.
INLINE bool gemm_by_tiles(const PackedWeight& w, int begin, int end, const char* rows, int n, const OutputView& out) {
  if (n < MIN_TILE_PRODUCT) return false;
  switch (w.format) {
    case WeightFormat::float32: return false;
    case WeightFormat::bfloat16:
      if (w.in % TILE_DEPTH) return false;
      gemm_bfloat16(w, begin, end, rows, n, out);
      return true;
    case WeightFormat::int8: gemm_groups<WeightFormat::int8>(w, begin, end, rows, n, out); return true;
    case WeightFormat::int4: gemm_groups<WeightFormat::int4>(w, begin, end, rows, n, out); return true;
    case WeightFormat::iq4: gemm_groups<WeightFormat::iq4>(w, begin, end, rows, n, out); return true;
    case WeightFormat::mxfp4: gemm_groups<WeightFormat::mxfp4>(w, begin, end, rows, n, out); return true;
    case WeightFormat::int5: gemm_groups<WeightFormat::int5>(w, begin, end, rows, n, out); return true;
    case WeightFormat::int6: gemm_groups<WeightFormat::int6>(w, begin, end, rows, n, out); return true;
    case WeightFormat::nvfp4: gemm_groups<WeightFormat::nvfp4>(w, begin, end, rows, n, out); return true;
  }
  return false;
}

}  // namespace retain::RETAIN_ISA
