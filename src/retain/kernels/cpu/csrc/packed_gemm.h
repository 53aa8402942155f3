// Products with packed weights: y [rows, out] (+)= x [rows, in] W^T + b.
//
// A matrix is packed in tiles of 16 outputs, so that one vector holds one number of each output. A thread that takes
// whole tiles reads its weights in one stream. The layout of a tile:
//
//   float32    [in][16]
//   bfloat16   [in / 2][16][2]: pairs of inputs, for the pairwise dot product
//   int4       for each group of 32 inputs [4][16][4] bytes: inputs 8i .. 8i+3 in low nibbles, 8i+4 .. 8i+7 in high;
//              then scale [16] and shift [16] in float16:   w = scale * q + shift
//   iq4, mxfp4 as int4, but q is a place in a codebook, and there is no shift:   w = scale * codebook[q]
//   nvfp4      as mxfp4, with two scales [16]: of the first and the last 16 inputs of the group
//   int5       as int4, and a plane [16][4] of bytes before the scales: bit i has the fifth bits of inputs 4i .. 4i+3
//   int6       the nibbles of q + 32; two planes [16][4] of bytes, in which inputs 0 .. 15 and 16 .. 31 have two bits
//              each; two scales, as nvfp4:   w = scale * q
//   int8       for each group of 32 inputs [8][16][4] bytes: q + 128, because the instruction multiplies unsigned by
//              signed numbers; then scale [16] in float16:   w = scale * q
//
// Scales follow the numbers of their group, because one core reads one stream nearly twice as fast as two.
// For quantized weights, `prepare_row` rounds activations to 8 bits in groups of 32, so sums within a group are exact
// integers. Each output is summed in the order of the inputs, for any number of rows. So a token's bits do not depend
// on the other tokens or on the chunk size. packed_tile_gemm.h has the same products on tiles, with the same bits.
#pragma once

#include "simd.h"
#ifdef RETAIN_TILES
#include "tiles.h"
#endif

namespace retain::RETAIN_ISA {

constexpr int TILE_VECTORS = TILE_OUT / WIDTH;
// The number of rows from which two tiles at once are faster. Fewer rows are bound by memory, which is fastest with one
// stream.
constexpr int min_rows_for_two_tiles(WeightFormat format) { return format == WeightFormat::int8 ? 12 : 4; }

// How far in advance a product with one row asks for weights. It is bound by memory, and an Intel processor's own
// prefetching fetches too little; a Zen 4's does better (log/cpu-speed.md).
constexpr int PREFETCH_BYTES = 4096;
#if defined(__x86_64__)
inline const bool PREFETCHES_WEIGHTS = [] {
  __builtin_cpu_init();
  return bool(__builtin_cpu_is("intel"));
}();
#else
constexpr bool PREFETCHES_WEIGHTS = false;
#endif

template <int ROWS>
INLINE void prefetch_weights(const void* p) {
  if (ROWS == 1 && PREFETCHES_WEIGHTS) __builtin_prefetch(static_cast<const char*>(p) + PREFETCH_BYTES, 0, 2);
}

// The number of rows at once whose sums stay in registers.
constexpr int max_rows(WeightFormat format, int tiles) {
  if (HAS_TILES && format != WeightFormat::float32) return 3;  // more rows are computed by tiles
  if (FEW_REGISTERS) return 4;
  return tiles == 2 && format >= WeightFormat::int8 ? 6 : 12;
}

// Bytes of one prepared row of activations.
INLINE int64_t row_bytes(const PackedWeight& w) {
  if (w.format == WeightFormat::float32) return round_up(int64_t(w.in) * 4, 64);
  if (w.format == WeightFormat::bfloat16) return round_up(int64_t(w.in + 1) * sizeof(Multiplier<bf16>), 64);
  return round_up(w.in + int64_t(w.num_groups()) * int64_t(sizeof(ActivationGroup)), 64);
}

// The groups of a prepared row follow its quantized numbers.
INLINE const ActivationGroup* groups_of(const PackedWeight& w, const char* row) {
  return reinterpret_cast<const ActivationGroup*>(row + w.in);
}

// ---- preparing activations --------------------------------------------------------------------------------------

INLINE void quantize(const float* x, int8_t* q, ActivationGroup& group) {
  I maxima = {};  // bits of absolute numbers have the numbers' order; infinity and NaN are the largest
  for (int i = 0; i < QUANT_GROUP; i += WIDTH) {
    const I y = (I)absolute(load<WIDTH>(x + i));
    maxima = maxima > y ? maxima : y;
  }
  const float maximum = bits_to_float(reduce_max<WIDTH>(maxima));
  const float scale = maximum <= __FLT_MAX__ ? maximum / 127 : __builtin_nanf("");
  const float inverse = maximum > 0 ? 127 / maximum : 0.0f;
  int32_t sums[2] = {};  // of halves
  for (int h = 0; h < 2; ++h) {
    I total = {};
    for (int i = h * QUANT_GROUP / 2; i < (h + 1) * QUANT_GROUP / 2; i += WIDTH) {
      const I n = round_to_int(load<WIDTH>(x + i) * inverse);
      total += n;
      store_bytes(q + i, n);
    }
    sums[h] = reduce_sum<WIDTH>(total);
  }
  const int32_t sum = sums[0] + sums[1];
  group = {scale, scale * float(sum), -128 * sum, {-32 * sums[0], -32 * sums[1]}};
}

INLINE void prepare_row(const PackedWeight& w, const float* x, char* row) {
  if (w.format == WeightFormat::float32) {
    memcpy(row, x, size_t(w.in) * 4);
  } else if (w.format == WeightFormat::bfloat16) {
    Multiplier<bf16>* out = reinterpret_cast<Multiplier<bf16>*>(row);
    int i = 0;
    for (; i + WIDTH <= w.in; i += WIDTH) store_multipliers<bf16>(out + i, load<WIDTH>(x + i));
    for (; i < w.in; ++i) out[i] = to_multiplier<bf16>(x[i]);
    out[w.in] = {};  // completes the last pair if `in` is odd
  } else {
    ActivationGroup* groups = reinterpret_cast<ActivationGroup*>(row + w.in);
    int8_t* q = reinterpret_cast<int8_t*>(row);
    for (int g = 0; g < w.num_groups(); ++g) quantize(x + g * QUANT_GROUP, q + g * QUANT_GROUP, groups[g]);
  }
}

// ---- products: sum[t][r] = row r times the outputs of one vector of tile t --------------------------------------

#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < n; ++i)

template <int TILES, int ROWS>
INLINE void dot_float32(const PackedWeight& w, const char* tile, int vector, const char* rows, F (&sum)[TILES][ROWS]) {
  const float* b = reinterpret_cast<const float*>(tile) + vector * WIDTH;
  const int64_t stride = row_bytes(w) / 4, tile_stride = w.tile_bytes() / 4;
  const float* a = reinterpret_cast<const float*>(rows);
  for (int k = 0; k < w.in; ++k, b += TILE_OUT) {
    prefetch_weights<ROWS>(b);
    F x[TILES];
    EACH(t, TILES) x[t] = load<WIDTH>(b + t * tile_stride);
    EACH(r, ROWS) EACH(t, TILES) sum[t][r] += a[r * stride + k] * x[t];
  }
}

template <int TILES, int ROWS>
INLINE void dot_bfloat16(const PackedWeight& w, const char* tile, int vector, const char* rows, F (&sum)[TILES][ROWS]) {
  const bf16* b = reinterpret_cast<const bf16*>(tile) + 2 * vector * WIDTH;
  const int64_t stride = row_bytes(w) / sizeof(Multiplier<bf16>), tile_stride = w.tile_bytes() / 2;
  const Multiplier<bf16>* a = reinterpret_cast<const Multiplier<bf16>*>(rows);
#ifdef RETAIN_TILES
  for (int begin = 0; begin < w.in; begin += TILE_DEPTH) {
    F even[TILES][ROWS] = {}, odd[TILES][ROWS] = {};
    const int end = begin + TILE_DEPTH < w.in ? begin + TILE_DEPTH : w.in;
    for (int k = begin; k < end; k += 2, b += 2 * TILE_OUT) EACH(t, TILES) {
        prefetch_weights<ROWS>(b);
        const Bf16Pairs<WIDTH> x = load_pairs<WIDTH>(b + t * tile_stride);
        EACH(r, ROWS) even[t][r] = add_even<WIDTH>(even[t][r], x, a + r * stride + k);
        EACH(r, ROWS) odd[t][r] = add_odd<WIDTH>(odd[t][r], x, a + r * stride + k);
      }
    EACH(r, ROWS) EACH(t, TILES) sum[t][r] = flush<WIDTH>(sum[t][r] + flush<WIDTH>(even[t][r] + odd[t][r]));
  }
#else
  for (int k = 0; k < w.in; k += 2, b += 2 * TILE_OUT) {
    prefetch_weights<ROWS>(b);
    Bf16Pairs<WIDTH> x[TILES];
    EACH(t, TILES) x[t] = load_pairs<WIDTH>(b + t * tile_stride);
    EACH(r, ROWS) EACH(t, TILES) sum[t][r] = dot<WIDTH>(sum[t][r], x[t], a + r * stride + k);
  }
#endif
}

// Unpacks the numbers of inputs 8 i .. 8 i + 3 and of the four behind them, for the outputs of one vector.
template <WeightFormat FORMAT>
INLINE void unpack_numbers(const uint8_t* group, int i, Bytes& low, Bytes& high) {
  const Bytes x = load_bytes(group + i * STEP_BYTES);
  low = low_nibbles(x), high = high_nibbles(x);
  if constexpr (has_codebook(FORMAT)) {
    low = look_up(codebook_of(FORMAT), low);
    high = look_up(codebook_of(FORMAT), high);
  }
  if constexpr (high_bits(FORMAT) > 0) {
    constexpr int MASK = ((1 << high_bits(FORMAT)) - 1) << 4;
    const HighBits first = find_high_bits(FORMAT, 2 * i), second = find_high_bits(FORMAT, 2 * i + 1);
    const Bytes plane = load_bytes(group + first.at);  // both are in the same one
    low = merge_bits(low, shift_bits(plane, 4 - first.bit), MASK);
    high = merge_bits(high, shift_bits(plane, 4 - second.bit), MASK);
  }
}

// Adds products with numbers of a format.
template <WeightFormat FORMAT>
INLINE I dot_numbers(I sum, const Bytes& x, const char* a) {
  return excess(FORMAT) < 128 ? dot_narrow(sum, x, a) : dot(sum, x, a);
}

// What the sum of products of a group starts from, or of a half of it.
template <WeightFormat FORMAT>
INLINE int32_t offset_of(const ActivationGroup& x, int half) {
  return has_shift(FORMAT) ? 0 : scales_per_group(FORMAT) == 2 ? x.half_offsets[half] : x.offset;
}

template <WeightFormat FORMAT, int TILES, int ROWS>
INLINE void dot_groups(const PackedWeight& w, const char* tile, int vector, const char* rows, F (&sum)[TILES][ROWS]) {
  constexpr int PARTS = scales_per_group(FORMAT), STEPS = QUANT_GROUP / (has_nibbles(FORMAT) ? 8 : 4) / PARTS;
  const char* group = tile;
  const int64_t stride = row_bytes(w), tile_stride = w.tile_bytes();
  const char* a = rows;
  const ActivationGroup* groups = groups_of(w, rows);  // of the first row
  for (int g = 0; g < w.num_groups(); ++g) {
    auto group_of_row = [&](int r) -> const ActivationGroup& {
      const char* row_group = reinterpret_cast<const char*>(groups + g) + r * stride;
      return *reinterpret_cast<const ActivationGroup*>(row_group);
    };
    const uint8_t* b = reinterpret_cast<const uint8_t*>(group) + 4 * vector * WIDTH;
    EACH(i, group_bytes(FORMAT) / 64) prefetch_weights<ROWS>(group + 64 * i);
    EACH(part, PARTS) {
      I group_sum[TILES][ROWS];
      EACH(r, ROWS) EACH(t, TILES) group_sum[t][r] = splat(offset_of<FORMAT>(group_of_row(r), part));
      EACH(step, STEPS) {
        const int i = part * STEPS + step;
        auto add = [&](const Bytes (&x)[TILES], int first) __attribute__((always_inline)) {
          EACH(r, ROWS) EACH(t, TILES) {
            group_sum[t][r] = dot_numbers<FORMAT>(group_sum[t][r], x[t], a + r * stride + first);
          }
        };
        if constexpr (has_nibbles(FORMAT)) {
          Bytes low[TILES], high[TILES];
          EACH(t, TILES) unpack_numbers<FORMAT>(b + t * tile_stride, i, low[t], high[t]);
          add(low, 8 * i);
          add(high, 8 * i + 4);
        } else {
          Bytes x[TILES];
          EACH(t, TILES) x[t] = load_bytes(b + i * STEP_BYTES + t * tile_stride);
          add(x, 4 * i);
        }
      }
      EACH(t, TILES) {
        const char* tile_scales = group + group_number_bytes(FORMAT) + t * tile_stride;
        const float16* scales = reinterpret_cast<const float16*>(tile_scales) + vector * WIDTH;
        const F scale = load<WIDTH>(scales + part * TILE_OUT);
        EACH(r, ROWS) sum[t][r] += __builtin_convertvector(group_sum[t][r], F) * (scale * group_of_row(r).scale);
        if constexpr (has_shift(FORMAT)) {
          const F shift = load<WIDTH>(scales + TILE_OUT);
          EACH(r, ROWS) sum[t][r] += shift * group_of_row(r).sum;
        }
      }
    }
    group += group_bytes(FORMAT);
    a += QUANT_GROUP;
  }
}

// Stores one vector of outputs of `rows` rows, starting at output `first` and clipped to w.out. It tests outside of its
// loops: inside, every sum would pass through memory.
INLINE void store_outputs(const PackedWeight& w, int first, const OutputView& out, const F* sum, int rows) {
  const int n = w.out - first;
  float biases[WIDTH] = {};
  if (out.bias)
    for (int i = 0; i < WIDTH && i < n; ++i) biases[i] = out.bias[first + i];
  const F bias = load<WIDTH>(biases);
  float* y = out.y + first;
  if (n >= WIDTH && out.accumulate) {
    for (int r = 0; r < rows; ++r, y += out.ldy) store<WIDTH>(y, load<WIDTH>(y) + (sum[r] + bias));
  } else if (n >= WIDTH) {
    for (int r = 0; r < rows; ++r, y += out.ldy) store<WIDTH>(y, sum[r] + bias);
  } else {
    for (int r = 0; r < rows; ++r, y += out.ldy) {
      const F x = sum[r] + bias;
      store_tail(y, n, out.accumulate ? load_tail(y, n) + x : x);
    }
  }
}

template <WeightFormat FORMAT, int TILES, int ROWS>
INLINE void gemm_block(const PackedWeight& w, int t, const char* rows, const OutputView& out) {
  const char* tile = w.data + t * w.tile_bytes();
  for (int vector = 0; vector < TILE_VECTORS; ++vector) {
    F sum[TILES][ROWS] = {};
    if constexpr (FORMAT == WeightFormat::float32) dot_float32(w, tile, vector, rows, sum);
    if constexpr (FORMAT == WeightFormat::bfloat16) dot_bfloat16(w, tile, vector, rows, sum);
    if constexpr (FORMAT >= WeightFormat::int8)
      dot_groups<FORMAT>(w, tile, vector, rows, sum);
    for (int i = 0; i < TILES; ++i) store_outputs(w, (t + i) * TILE_OUT + vector * WIDTH, out, sum[i], ROWS);
  }
}

template <WeightFormat FORMAT, int TILES, int ROWS>
void gemm_remaining_rows(const PackedWeight& w, int tile, const char* rows, int n, const OutputView& out) {
  if constexpr (ROWS > 0) {
    if (n == ROWS)
      gemm_block<FORMAT, TILES, ROWS>(w, tile, rows, out);
    else
      gemm_remaining_rows<FORMAT, TILES, ROWS - 1>(w, tile, rows, n, out);
  }
}

template <WeightFormat FORMAT, int TILES>
void gemm_rows(const PackedWeight& w, int tile, const char* rows, int n, OutputView out) {
  constexpr int MAX_ROWS = max_rows(FORMAT, TILES);
  for (; n >= MAX_ROWS; n -= MAX_ROWS) {
    gemm_block<FORMAT, TILES, MAX_ROWS>(w, tile, rows, out);
    rows += MAX_ROWS * row_bytes(w);
    out.y += MAX_ROWS * out.ldy;
  }
  gemm_remaining_rows<FORMAT, TILES, MAX_ROWS - 1>(w, tile, rows, n, out);
}

template <WeightFormat FORMAT>
void gemm_tiles(const PackedWeight& w, int begin, int end, const char* rows, int n, const OutputView& out) {
  if constexpr (!FEW_REGISTERS)
    for (; n >= min_rows_for_two_tiles(FORMAT) && end - begin > 1; begin += 2)
      gemm_rows<FORMAT, 2>(w, begin, rows, n, out);
  for (; begin < end; ++begin) gemm_rows<FORMAT, 1>(w, begin, rows, n, out);
}
#undef EACH

// ---- unpacking --------------------------------------------------------------------------------------------------

INLINE float unpack_number(const PackedWeight& w, const char* tile, int o, int i) {
  if (w.format == WeightFormat::float32) return reinterpret_cast<const float*>(tile)[i * TILE_OUT + o];
  if (w.format == WeightFormat::bfloat16)
    return to_float(reinterpret_cast<const bf16*>(tile)[i / 2 * 2 * TILE_OUT + 2 * o + i % 2]);
  const char* group = tile + i / QUANT_GROUP * group_bytes(w.format);
  const uint8_t* q = reinterpret_cast<const uint8_t*>(group);
  const float16* scales = reinterpret_cast<const float16*>(group + group_number_bytes(w.format)) + o;
  const int k = i % QUANT_GROUP, step = k / 4, lane = 4 * o + k % 4;
  const float scale = to_float(scales[k * scales_per_group(w.format) / QUANT_GROUP * TILE_OUT]);
  if (!has_nibbles(w.format)) return scale * (int(q[step * STEP_BYTES + lane]) - excess(w.format));
  const uint8_t byte = q[step / 2 * STEP_BYTES + lane];
  int number = step % 2 ? byte >> 4 : byte & 15;
  if (has_codebook(w.format)) number = codebook_of(w.format)[number];
  if (const int bits = high_bits(w.format)) {
    const HighBits high = find_high_bits(w.format, step);
    number |= (q[high.at + lane] >> high.bit & ((1 << bits) - 1)) << 4;
  }
  const float x = scale * (number - excess(w.format));
  return has_shift(w.format) ? x + to_float(scales[TILE_OUT]) : x;
}

}  // namespace retain::RETAIN_ISA
