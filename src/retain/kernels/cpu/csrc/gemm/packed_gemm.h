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
// integers; or to bfloat16 (dequantized_gemm.h). Each output is summed in the order of the inputs, for any number of
// rows. So a token's bits do not depend on the other tokens or on the chunk size. packed_tile_gemm.h has the same
// products on tiles, with the same bits.
#pragma once

#include "isa/simd.h"
#ifdef RETAIN_TILES
#include "gemm/tiles.h"
#endif

namespace retain::RETAIN_ISA {

constexpr int TILE_VECTORS = TILE_OUT / WIDTH;
constexpr int MAX_BLOCK_ROWS = 256;  // whose sums lie in memory between panels of weights
// The number of rows up to which quantized weights are multiplied in one pass, with a group's numbers in registers.
constexpr int MAX_FEW_ROWS = HAS_TILES ? 3 : FEW_REGISTERS ? 4 : 8;

// How far in advance products ask for weights. Few rows are bound by memory, and an Intel processor's own prefetching
// fetches too little; a Zen 4's does better (log/cpu-speed.md).
constexpr int PREFETCH_BYTES = 4096;
#if defined(__x86_64__)
inline const bool PREFETCHES_WEIGHTS = [] {
  __builtin_cpu_init();
  return bool(__builtin_cpu_is("intel"));
}();
#else
constexpr bool PREFETCHES_WEIGHTS = false;
#endif

// The number of rows from which two tiles at once are faster. Fewer rows are bound by memory, which is fastest with one
// stream, unless weights are asked for in advance.
INLINE int min_rows_for_two_tiles(WeightFormat format) {
  if (PREFETCHES_WEIGHTS && format >= WeightFormat::int8) return 1;
  return format == WeightFormat::int8 ? 12 : 4;
}

// Asks for what will be read PREFETCH_BYTES after p, which is in the first of `tiles` tiles that are read at once.
template <int ROWS>
INLINE void prefetch_weights(const char* p, const char* tile, int64_t tile_stride, int tiles, int bytes) {
  if (ROWS > MAX_FEW_ROWS || !PREFETCHES_WEIGHTS) return;  // more rows wait for arithmetic
  p += PREFETCH_BYTES;
  if (p - tile >= tile_stride) p += (tiles - 1) * tile_stride;  // behind the last tile
  for (int t = 0; t < tiles; ++t)
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + t * tile_stride + i, 0, 2);
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
  if (w.format == WeightFormat::bfloat16 || w.is_dequantized())
    return round_up(int64_t(w.in + 1) * sizeof(Multiplier<bf16>), 64);
  return round_up(w.in + int64_t(w.num_groups()) * int64_t(sizeof(ActivationGroup)), 64);
}

// The groups of a prepared row follow its quantized numbers.
INLINE const ActivationGroup* groups_of(const PackedWeight& w, const char* row) {
  return reinterpret_cast<const ActivationGroup*>(row + w.in);
}

INLINE OutputView skip_rows(OutputView out, int rows) {
  out.y += rows * out.ldy;
  return out;
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
  } else if (w.format == WeightFormat::bfloat16 || w.is_dequantized()) {
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
    prefetch_weights<ROWS>(reinterpret_cast<const char*>(b), tile, w.tile_bytes(), TILES, 4 * TILE_OUT);
    F x[TILES];
    EACH(t, TILES) x[t] = load<WIDTH>(b + t * tile_stride);
    EACH(r, ROWS) EACH(t, TILES) sum[t][r] += a[r * stride + k] * x[t];
  }
}

// Tiles of weights in bfloat16, [depth / 2][16][2] each, and prepared rows. Strides are in bytes.
struct Bfloat16Args {
  const char* tile;
  int64_t tile_stride;
  int depth;
  const char* rows;
  int64_t row_stride;
};

template <int TILES, int ROWS>
INLINE void dot_bfloat16(const Bfloat16Args& p, int vector, F (&sum)[TILES][ROWS]) {
  const bf16* b = reinterpret_cast<const bf16*>(p.tile) + 2 * vector * WIDTH;
  const int64_t stride = p.row_stride / sizeof(Multiplier<bf16>), tile_stride = p.tile_stride / 2;
  const Multiplier<bf16>* a = reinterpret_cast<const Multiplier<bf16>*>(p.rows);
  auto prefetch = [&]() __attribute__((always_inline)) {
    prefetch_weights<ROWS>(reinterpret_cast<const char*>(b), p.tile, p.tile_stride, TILES, 4 * TILE_OUT);
  };
#ifdef RETAIN_TILES
  for (int begin = 0; begin < p.depth; begin += TILE_DEPTH) {
    F even[TILES][ROWS] = {}, odd[TILES][ROWS] = {};
    const int end = begin + TILE_DEPTH < p.depth ? begin + TILE_DEPTH : p.depth;
    for (int k = begin; k < end; k += 2, b += 2 * TILE_OUT) {
      prefetch();
      EACH(t, TILES) {
        const Bf16Pairs<WIDTH> x = load_pairs<WIDTH>(b + t * tile_stride);
        EACH(r, ROWS) even[t][r] = add_even<WIDTH>(even[t][r], x, a + r * stride + k);
        EACH(r, ROWS) odd[t][r] = add_odd<WIDTH>(odd[t][r], x, a + r * stride + k);
      }
    }
    EACH(r, ROWS) EACH(t, TILES) sum[t][r] = flush<WIDTH>(sum[t][r] + flush<WIDTH>(even[t][r] + odd[t][r]));
  }
#else
  for (int k = 0; k < p.depth; k += 2, b += 2 * TILE_OUT) {
    prefetch();
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

// The same where nothing else uses the numbers at `a`: one instruction reads and multiplies them. GCC makes it two.
template <WeightFormat FORMAT>
INLINE I dot_numbers_once(I sum, const Bytes& x, const char* a) {
#ifdef __AVX512VNNI__
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(x), "m"(*reinterpret_cast<const int32_t*>(a)));
  return sum;
#else
  return dot_numbers<FORMAT>(sum, x, a);
#endif
}

// Hides where an address comes from. Of addresses with a common base the compiler would keep all differences, and of
// numbers at equal ones the values, which takes more registers than there are.
INLINE void hide(const char*& address) { asm volatile("" : "+r"(address)); }

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

// The same for few rows. The numbers of a group, or of a half of it, are unpacked once; then one row after the other is
// multiplied with them. More rows fit in registers, but two tiles share no load of a row's numbers.
template <WeightFormat FORMAT, int TILES, int ROWS>
INLINE void dot_groups_of_few_rows(const PackedWeight& w, const char* tile, int vector, const char* rows,
                                   F (&result)[TILES][ROWS]) {
  constexpr int PARTS = scales_per_group(FORMAT), NUMBERS = QUANT_GROUP / 4 / PARTS;
  const int64_t stride = row_bytes(w), tile_stride = w.tile_bytes();
  F sum[TILES][ROWS] = {};  // `result` is in memory
  const char* group = tile;
  const char* first_row = rows;
  int64_t to_group = w.in;  // from numbers of a row to the ActivationGroup that they belong to
  for (int g = 0; g < w.num_groups(); ++g) {
    prefetch_weights<ROWS>(group, tile, tile_stride, TILES, group_bytes(FORMAT));
    EACH(t, TILES) EACH(part, PARTS) {
      const char* own = group + t * tile_stride;
      const uint8_t* b = reinterpret_cast<const uint8_t*>(own) + 4 * vector * WIDTH;
      Bytes x[NUMBERS];
      if constexpr (has_nibbles(FORMAT)) {
        EACH(i, NUMBERS / 2) unpack_numbers<FORMAT>(b, part * NUMBERS / 2 + i, x[2 * i], x[2 * i + 1]);
      } else {
        EACH(i, NUMBERS) x[i] = load_bytes(b + i * STEP_BYTES);
      }
      const float16* scales = reinterpret_cast<const float16*>(own + group_number_bytes(FORMAT)) + vector * WIDTH;
      const F scale = load<WIDTH>(scales + part * TILE_OUT);
      F shift = {};
      if constexpr (has_shift(FORMAT)) shift = load<WIDTH>(scales + TILE_OUT);
      const char* row = first_row;
      EACH(r, ROWS) {
        hide(row);
        const ActivationGroup& activations = *reinterpret_cast<const ActivationGroup*>(row + to_group);
        I group_sum = splat(offset_of<FORMAT>(activations, part));
        EACH(i, NUMBERS) group_sum = dot_numbers_once<FORMAT>(group_sum, x[i], row + 4 * (part * NUMBERS + i));
        sum[t][r] += __builtin_convertvector(group_sum, F) * (scale * activations.scale);
        if constexpr (has_shift(FORMAT)) sum[t][r] += shift * activations.sum;
        row += stride;
      }
    }
    group += group_bytes(FORMAT);
    first_row += QUANT_GROUP;
    to_group += int64_t(sizeof(ActivationGroup)) - QUANT_GROUP;
  }
  EACH(t, TILES) EACH(r, ROWS) result[t][r] = sum[t][r];
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

// Computes TILES tiles of outputs. `dot(tile, vector, sum)` sums the products of one vector of each.
template <int TILES, int ROWS, class Dot>
INLINE void gemm_block(const PackedWeight& w, int t, const OutputView& out, Dot dot) {
  for (int vector = 0; vector < TILE_VECTORS; ++vector) {
    F sum[TILES][ROWS] = {};
    dot(w.data + t * w.tile_bytes(), vector, sum);
    for (int i = 0; i < TILES; ++i) store_outputs(w, (t + i) * TILE_OUT + vector * WIDTH, out, sum[i], ROWS);
  }
}

template <WeightFormat FORMAT, int TILES, int ROWS>
INLINE void gemm_many_rows(const PackedWeight& w, int t, const char* rows, const OutputView& out) {
  gemm_block<TILES, ROWS>(w, t, out, [&](const char* tile, int vector, auto& sum) __attribute__((always_inline)) {
    if constexpr (FORMAT == WeightFormat::float32) dot_float32(w, tile, vector, rows, sum);
    if constexpr (FORMAT == WeightFormat::bfloat16)
      dot_bfloat16({tile, w.tile_bytes(), w.in, rows, row_bytes(w)}, vector, sum);
    if constexpr (FORMAT >= WeightFormat::int8) dot_groups<FORMAT>(w, tile, vector, rows, sum);
  });
}

template <WeightFormat FORMAT, int TILES, int ROWS>
void gemm_remaining_rows(const PackedWeight& w, int t, const char* rows, int n, const OutputView& out) {
  if constexpr (ROWS > 0) {
    if (n != ROWS) return gemm_remaining_rows<FORMAT, TILES, ROWS - 1>(w, t, rows, n, out);
    if constexpr (FORMAT >= WeightFormat::int8 && ROWS <= MAX_FEW_ROWS)
      gemm_block<TILES, ROWS>(w, t, out, [&](const char* tile, int vector, auto& sum) __attribute__((always_inline)) {
        dot_groups_of_few_rows<FORMAT>(w, tile, vector, rows, sum);
      });
    else
      gemm_many_rows<FORMAT, TILES, ROWS>(w, t, rows, out);
  }
}

template <WeightFormat FORMAT, int TILES>
void gemm_rows(const PackedWeight& w, int tile, const char* rows, int n, OutputView out) {
  constexpr int MAX_ROWS = max_rows(FORMAT, TILES);
  constexpr int MAX_REMAINING = FORMAT >= WeightFormat::int8 && MAX_FEW_ROWS >= MAX_ROWS ? MAX_FEW_ROWS : MAX_ROWS - 1;
  for (; n > MAX_REMAINING; n -= MAX_ROWS) {
    gemm_many_rows<FORMAT, TILES, MAX_ROWS>(w, tile, rows, out);
    rows += MAX_ROWS * row_bytes(w);
    out.y += MAX_ROWS * out.ldy;
  }
  gemm_remaining_rows<FORMAT, TILES, MAX_REMAINING>(w, tile, rows, n, out);
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
