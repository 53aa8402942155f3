// Number formats of packed weight matrices, and the bytes of their tiles. packed_gemm.h draws the layouts.
//
// Every function here is forced inline, see types.h.
#pragma once

#include <cstddef>
#include <cstdint>

#define INLINE inline __attribute__((always_inline))

namespace retain {

enum class WeightFormat : int { float32, bfloat16, int8, int4, iq4, mxfp4, int5, int6, nvfp4 };
constexpr int TILE_OUT = 16;     // outputs of a tile
constexpr int PANEL_TILES = 2;  // that are unpacked to bfloat16 at a time
constexpr int QUANT_GROUP = 32;  // inputs whose activations share a scale
constexpr int MAX_PADDED_ROWS = 16;  // kernels compute rows of activations in multiples of at most that many
constexpr int STEP_BYTES = 4 * TILE_OUT;  // of four inputs in 8 bits, or of eight nibbles

INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Formats whose numbers lie in nibbles, some with 1 or 2 higher bits in a plane behind them.
INLINE constexpr bool has_nibbles(WeightFormat f) { return f >= WeightFormat::int4; }
INLINE constexpr int high_bits(WeightFormat f) { return f == WeightFormat::int5 ? 1 : f == WeightFormat::int6 ? 2 : 0; }
INLINE constexpr bool has_shift(WeightFormat f) { return f == WeightFormat::int4 || f == WeightFormat::int5; }
// Nibbles are places in a codebook.
INLINE constexpr bool has_codebook(WeightFormat f) {
  return f == WeightFormat::iq4 || f == WeightFormat::mxfp4 || f == WeightFormat::nvfp4;
}
INLINE constexpr int scales_per_group(WeightFormat f) {
  return f == WeightFormat::int6 || f == WeightFormat::nvfp4 ? 2 : 1;
}
// What is added to a number, because the instruction multiplies unsigned by signed ones.
INLINE constexpr int excess(WeightFormat f) { return has_shift(f) ? 0 : scales_per_group(f) == 2 ? 32 : 128; }

// The numbers of codebooks, plus the excess: those of IQ4_NL and IQ4_XS, and those of MXFP4 and NVFP4 (doubled: 0, 0.5,
// 1, 1.5, 2, ...).
constexpr uint8_t IQ4_CODEBOOK[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t MXFP4_CODEBOOK[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
constexpr uint8_t NVFP4_CODEBOOK[16] = {32, 33, 34, 35, 36, 38, 40, 44, 32, 31, 30, 29, 28, 26, 24, 20};
INLINE constexpr const uint8_t* codebook_of(WeightFormat f) {
  return f == WeightFormat::iq4 ? IQ4_CODEBOOK : f == WeightFormat::mxfp4 ? MXFP4_CODEBOOK : NVFP4_CODEBOOK;
}

// Bytes of one quantization group in a tile: its numbers alone, and its numbers followed by its scales.
INLINE constexpr int group_number_bytes(WeightFormat f) {
  return QUANT_GROUP * TILE_OUT * (has_nibbles(f) ? 4 + high_bits(f) : 8) / 8;
}
INLINE constexpr int group_bytes(WeightFormat f) {
  return group_number_bytes(f) + 2 * TILE_OUT * (scales_per_group(f) + has_shift(f));
}

// The place of the high bits of inputs 4 step .. 4 step + 3 of a group: bytes from its start, and the lowest bit.
struct HighBits {
  int at, bit;
};
INLINE constexpr HighBits find_high_bits(WeightFormat f, int step) {
  const int steps = 8 / high_bits(f);  // of a plane
  return {group_number_bytes(WeightFormat::int4) + step / steps * STEP_BYTES, step % steps * high_bits(f)};
}

// One group of 32 quantized activations, x = scale * q.
struct ActivationGroup {
  float scale, sum;  // sum of x
  // What the excess of weights adds to sums of products, negated: of 128 to the sum of all, of 32 to those of halves.
  int32_t offset, half_offsets[2];
};

// How quantized weights are multiplied: exact integers, by activations of 8 bits; or both rounded to bfloat16.
enum class Products : int { integers, bfloat16 };

// A weight matrix [out, in] in tiles.
struct PackedWeight {
  const char* data;  // aligned to a cache line
  int out, in;
  WeightFormat format;
  Products products = Products::integers;  // of this call: the same weights serve both

  INLINE bool is_quantized() const { return format >= WeightFormat::int8; }
  INLINE bool is_dequantized() const { return is_quantized() && products == Products::bfloat16; }
  INLINE PackedWeight with(Products other) const { return {data, out, in, format, other}; }

  INLINE int num_tiles() const { return (out + TILE_OUT - 1) / TILE_OUT; }
  INLINE int num_groups() const { return in / QUANT_GROUP; }
  INLINE int64_t tile_bytes() const {
    if (format == WeightFormat::float32) return int64_t(in) * TILE_OUT * 4;
    if (format == WeightFormat::bfloat16) return round_up(in, 2) * TILE_OUT * 2;
    return int64_t(num_groups()) * group_bytes(format);
  }
};

// Writes 32 numbers of one row, in 8 bits, and their scales into a group of a tile. `lane` is the row's place in it.
// Four numbers are moved at a time, as the bytes of a word.
INLINE void store_group(WeightFormat f, const uint8_t* q, const uint16_t* scale, uint16_t shift, char* group,
                        int lane) {
  constexpr int WORDS = QUANT_GROUP / 4;
  char* to = group + 4 * lane;
  uint16_t* scales = reinterpret_cast<uint16_t*>(group + group_number_bytes(f)) + lane;
  for (int i = 0; i < scales_per_group(f); ++i) scales[i * TILE_OUT] = scale[i];
  if (has_shift(f)) scales[TILE_OUT] = shift;
  uint8_t number[QUANT_GROUP];
  for (int i = 0; i < QUANT_GROUP; ++i) number[i] = uint8_t(q[i] + (has_codebook(f) ? 0 : excess(f)));
  uint32_t word[WORDS];
  __builtin_memcpy(word, number, sizeof word);
  const auto store = [&](int at, uint32_t bytes) { __builtin_memcpy(to + at, &bytes, 4); };
  if (!has_nibbles(f)) {
    for (int i = 0; i < WORDS; ++i) store(i * STEP_BYTES, word[i]);
    return;
  }
  constexpr uint32_t NIBBLES = 0x0f0f0f0f;
  for (int i = 0; i < WORDS; i += 2)
    store(i / 2 * STEP_BYTES, (word[i] & NIBBLES) | (word[i + 1] & NIBBLES) << 4);
  if (!high_bits(f)) return;
  uint32_t plane = 0;
  for (int i = 0; i < WORDS; ++i) {
    const HighBits high = find_high_bits(f, i);
    plane |= (word[i] >> 4 & NIBBLES) << high.bit;
    if (high.bit + high_bits(f) < 8) continue;
    store(high.at, plane);
    plane = 0;
  }
}

}  // namespace retain
