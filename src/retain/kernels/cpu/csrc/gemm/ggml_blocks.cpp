// Unpacks ggml's blocks, in which GGUF files hold matrices, into tiles. CMake compiles this file once for each
// instruction set, and with -ffp-contract=off: a fused multiply-add would differ from what kernels/weights/ggml_blocks.py, the
// definition, computes.
//
// A block is N numbers in groups that share a scale: x = scale * (q - ZERO) (+ shift). The structs below know the bits of
// each type, as ggml-common.h of llama.cpp defines them. What follows them is the same for all types.
#include "isa/simd.h"

namespace retain::RETAIN_ISA {

static INLINE uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}
static INLINE float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

static INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  const float subnormal = float(int32_t(rest)) * 0x1p-24f;  // no float is subnormal on the way, which would be slow
  const uint32_t other = (rest << 13) + (rest >= 0x7c00 ? 0x70000000 : 0x38000000);
  return float_of(sign | (rest < 0x400 ? bits_of(subnormal) : other));
}

// Rounds to nearest, ties to even. What is too large becomes infinite, NaN stays NaN. All cases are computed, so that a
// compiler makes vectors of a loop.
static INLINE uint16_t float_to_half(float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000, rest = bits_of(x) & 0x7fffffff;
  const uint32_t large = rest > 0x7f800000 ? 0x7e00 : 0x7c00;
  // Below 2^-14 halves are multiples of 2^-24, the last bits of floats around 0.5.
  const uint32_t small = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
  const uint32_t other = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
  // 65520 is the first that rounds to 2^16.
  return uint16_t(sign | (rest >= 0x477ff000 ? large : rest < 0x38800000 ? small : other));
}
static INLINE bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

static INLINE float load_half(const uint8_t* p) { return half_to_float(uint16_t(p[0] | p[1] << 8)); }

// Eight bytes at a time: compilers would move the 16 of a small block one by one.
constexpr uint64_t EACH_BYTE = 0x0101010101010101;
static INLINE uint64_t load_eight(const uint8_t* p) {
  uint64_t x;
  __builtin_memcpy(&x, p, 8);
  return x;
}
static INLINE void store_eight(int8_t* p, uint64_t x) { __builtin_memcpy(p, &x, 8); }

// Splits n bytes: the lower four bits of all, then the upper four.
static INLINE void split_nibbles(const uint8_t* from, int n, int8_t* q) {
  for (int i = 0; i < n; i += 8) {
    const uint64_t x = load_eight(from + i);
    store_eight(q + i, x & 15 * EACH_BYTE);
    store_eight(q + n + i, x >> 4 & 15 * EACH_BYTE);
  }
}

// The 6-bit factors of the scales and shifts of 8 groups, in the 12 bytes of Q4_K and Q5_K.
static INLINE void split_factors(const uint8_t* b, float d, float m, float* scale, float* shift) {
  for (int g = 0; g < 4; ++g) {
    scale[g] = d * float(b[g] & 63);
    shift[g] = -(m * float(b[4 + g] & 63));
    scale[4 + g] = d * float((b[8 + g] & 15) | b[g] >> 6 << 4);
    shift[4 + g] = -(m * float(b[8 + g] >> 4 | b[4 + g] >> 6 << 4));
  }
}

// N numbers in BYTES; GROUP numbers share a scale. NATIVE is the format of a tile that holds q, scale and shift as they
// are; float32 where there is none. Where it has a codebook, `decode` gives places in it.
template <int N_, int BYTES_, int GROUP_, int ZERO_, bool HAS_SHIFT_, WeightFormat NATIVE_>
struct Layout {
  static constexpr int N = N_, BYTES = BYTES_, GROUP = GROUP_, ZERO = ZERO_;
  static constexpr bool HAS_SHIFT = HAS_SHIFT_;
  static constexpr WeightFormat NATIVE = NATIVE_;
};
constexpr WeightFormat NONE = WeightFormat::float32;

struct Q4_0 : Layout<32, 18, 32, 8, false, WeightFormat::int4> {
  static INLINE void decode(const uint8_t* b, int8_t* q, float* scale, float*) {
    scale[0] = load_half(b);
    split_nibbles(b + 2, 16, q);
  }
};

struct Q4_1 : Layout<32, 20, 32, 0, true, WeightFormat::int4> {
  static INLINE void decode(const uint8_t* b, int8_t* q, float* scale, float* shift) {
    scale[0] = load_half(b);
    shift[0] = load_half(b + 2);
    split_nibbles(b + 4, 16, q);
  }
};

// Bit i of a byte is that of number i, so byte i of a word with this byte eight times keeps bit i alone.
static INLINE void add_fifth_bits(const uint8_t* high, int8_t* q) {
  for (int i = 0; i < 32; i += 8) {
    const uint64_t own = high[i / 8] * EACH_BYTE & 0x8040201008040201;
    const uint64_t is_set = (own + 0x7f * EACH_BYTE) >> 7 & EACH_BYTE;
    store_eight(q + i, load_eight(reinterpret_cast<uint8_t*>(q + i)) | is_set << 4);
  }
}

struct Q5_0 : Layout<32, 22, 32, 16, false, WeightFormat::int5> {
  static INLINE void decode(const uint8_t* b, int8_t* q, float* scale, float*) {
    scale[0] = load_half(b);
    split_nibbles(b + 6, 16, q);
    add_fifth_bits(b + 2, q);
  }
};

struct Q5_1 : Layout<32, 24, 32, 0, true, WeightFormat::int5> {
  static INLINE void decode(const uint8_t* b, int8_t* q, float* scale, float* shift) {
    scale[0] = load_half(b);
    shift[0] = load_half(b + 2);
    split_nibbles(b + 8, 16, q);
    add_fifth_bits(b + 4, q);
  }
};

struct Q8_0 : Layout<32, 34, 32, 0, false, WeightFormat::int8> {
  static INLINE void decode(const uint8_t* b, int8_t* q, float* scale, float*) {
    scale[0] = load_half(b);
    __builtin_memcpy(q, b + 2, 32);
  }
};

// Splits 64 bytes of four 2-bit numbers each, as Q2_K and Q3_K hold them.
static INLINE void split_pairs(const uint8_t* from, int8_t* q) {
  for (int c = 0; c < 2; ++c)
    for (int s = 0; s < 4; ++s)
      for (int i = 0; i < 32; ++i) q[c * 128 + s * 32 + i] = from[c * 32 + i] >> 2 * s & 3;
}

struct Q2_K : Layout<256, 84, 16, 0, true, NONE> {
  static INLINE void decode(const uint8_t* b, int8_t* q, float* scale, float* shift) {
    const float d = load_half(b + 80), m = load_half(b + 82);
    for (int g = 0; g < 16; ++g) {
      scale[g] = d * float(b[g] & 15);
      shift[g] = -(m * float(b[g] >> 4));
    }
    split_pairs(b + 16, q);
  }
};

struct Q3_K : Layout<256, 110, 16, 4, false, WeightFormat::int6> {
  static INLINE void decode(const uint8_t* b, int8_t* q, float* scale, float*) {
    const uint8_t* factors = b + 96;
    const float d = load_half(b + 108);
    for (int g = 0; g < 16; ++g) {
      const int low = g < 8 ? factors[g] & 15 : factors[g - 8] >> 4, high = factors[8 + g % 4] >> 2 * (g / 4) & 3;
      scale[g] = d * float((low | high << 4) - 32);
    }
    split_pairs(b + 32, q);
    for (int j = 0; j < 8; ++j)
      for (int i = 0; i < 32; ++i) q[32 * j + i] |= int8_t((b[i] >> j & 1) << 2);
  }
};

struct Q4_K : Layout<256, 144, 32, 0, true, WeightFormat::int4> {
  static INLINE void decode(const uint8_t* b, int8_t* q, float* scale, float* shift) {
    split_factors(b + 4, load_half(b), load_half(b + 2), scale, shift);
    for (int c = 0; c < 4; ++c) split_nibbles(b + 16 + 32 * c, 32, q + 64 * c);
  }
};

struct Q5_K : Layout<256, 176, 32, 0, true, WeightFormat::int5> {
  static INLINE void decode(const uint8_t* b, int8_t* q, float* scale, float* shift) {
    split_factors(b + 4, load_half(b), load_half(b + 2), scale, shift);
    for (int c = 0; c < 4; ++c) split_nibbles(b + 48 + 32 * c, 32, q + 64 * c);
    for (int g = 0; g < 8; ++g)
      for (int i = 0; i < 32; ++i) q[32 * g + i] |= int8_t((b[16 + i] >> g & 1) << 4);
  }
};

struct Q6_K : Layout<256, 210, 16, 32, false, WeightFormat::int6> {
  static INLINE void decode(const uint8_t* b, int8_t* q, float* scale, float*) {
    const float d = load_half(b + 208);
    for (int g = 0; g < 16; ++g) scale[g] = d * float(int8_t(b[192 + g]));
    for (int h = 0; h < 2; ++h) {
      split_nibbles(b + 64 * h, 64, q + 128 * h);
      for (int s = 0; s < 4; ++s)
        for (int i = 0; i < 32; ++i) q[128 * h + 32 * s + i] |= int8_t((b[128 + 32 * h + i] >> 2 * s & 3) << 4);
    }
  }
};

struct IQ4_NL : Layout<32, 18, 32, 0, false, WeightFormat::iq4> {
  static INLINE void decode(const uint8_t* b, int8_t* q, float* scale, float*) {
    scale[0] = load_half(b);
    split_nibbles(b + 2, 16, q);
  }
};

struct IQ4_XS : Layout<256, 136, 32, 0, false, WeightFormat::iq4> {
  static INLINE void decode(const uint8_t* b, int8_t* q, float* scale, float*) {
    const float d = load_half(b);
    const int high = b[2] | b[3] << 8;
    for (int g = 0; g < 8; ++g) {
      const int low = b[4 + g / 2] >> 4 * (g % 2) & 15;
      scale[g] = d * float((low | (high >> 2 * g & 3) << 4) - 32);
      split_nibbles(b + 8 + 16 * g, 16, q + 32 * g);
    }
  }
};

// The scale is a power of two, halved as the codebook is doubled.
struct MXFP4 : Layout<32, 17, 32, 0, false, WeightFormat::mxfp4> {
  static INLINE void decode(const uint8_t* b, int8_t* q, float* scale, float*) {
    scale[0] = float_of(b[0] < 2 ? 0x00200000u << b[0] : uint32_t(b[0] - 1) << 23);
    split_nibbles(b + 1, 16, q);
  }
};

// Scales are floats of 8 bits without a sign: 4 of the exponent, 3 of the mantissa. Halved as the codebook is doubled.
struct NVFP4 : Layout<64, 36, 16, 0, false, WeightFormat::nvfp4> {
  static INLINE void decode(const uint8_t* b, int8_t* q, float* scale, float*) {
    for (int g = 0; g < 4; ++g) {
      const int exponent = b[g] >> 3 & 15, mantissa = (b[g] & 7) + (exponent ? 8 : 0);
      const float unit = float_of(uint32_t((exponent ? exponent : 1) - 11 + 127) << 23);
      scale[g] = b[g] == 127 ? 0 : unit * float(mantissa);  // 127 is not a number
      split_nibbles(b + 4 + 8 * g, 8, q + 16 * g);
    }
  }
};

static INLINE F load_floats(const int8_t* p) {
#if RETAIN_WIDTH == 16 && defined(__AVX512F__)  // compilers would widen bytes one by one
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif RETAIN_WIDTH == 8 && defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  F x;
  for (int l = 0; l < WIDTH; ++l) x[l] = p[l];
  return x;
#endif
}

// Computes n numbers of some blocks.
template <class B>
static INLINE void dequantize(const int8_t* q, const float* scale, const float* shift, int n, float* x) {
  for (int g = 0; g < n / B::GROUP; ++g)
    for (int i = 0; i < B::GROUP; i += WIDTH, q += WIDTH, x += WIDTH) {
      const F product = splat(scale[g]) * (load_floats(q) - float(B::ZERO));
      store<WIDTH>(x, B::HAS_SHIFT ? product + splat(shift[g]) : product);
    }
}

static INLINE F clamp(F x, float low, float high) { return x < low ? splat(low) : x > high ? splat(high) : x; }
static INLINE bool has_lanes(I mask) { return reduce_or<WIDTH>(mask) != 0; }
static INLINE float nonzero(float scale) { return scale == 0 ? 1 : scale; }

// See quantize_int8 and quantize_int4 in kernels/weights/quantized.py. They return whether all numbers and scales are finite.
static INLINE bool quantize_int8(const float* x, int8_t* q, uint16_t* scale) {
  F largest = splat(0.0f);
  for (int i = 0; i < QUANT_GROUP; i += WIDTH) largest = max(absolute(load<WIDTH>(x + i)), largest);
  *scale = float_to_half(reduce_max<WIDTH>(largest) / 127);
  const F step = splat(nonzero(half_to_float(*scale)));
  I unordered{};
  for (int i = 0; i < QUANT_GROUP; i += WIDTH) {
    const F v = load<WIDTH>(x + i);
    unordered |= (I)(v != v);
    store_bytes(q + i, round_to_int(clamp(v / step, -127, 127)));
  }
  return is_finite(*scale) && !has_lanes(unordered);
}

static INLINE bool quantize_int4(const float* x, int8_t* q, uint16_t* scale, uint16_t* shift) {
  F low = load<WIDTH>(x), high = low;
  for (int i = WIDTH; i < QUANT_GROUP; i += WIDTH) {
    const F v = load<WIDTH>(x + i);
    low = v < low ? v : low;
    high = max(v, high);
  }
  const float lowest = -reduce_max<WIDTH>(-low) + 0.0f, highest = reduce_max<WIDTH>(high) + 0.0f;  // never -0
  *scale = float_to_half((highest - lowest) / 15);
  *shift = float_to_half(lowest);
  const F step = splat(nonzero(half_to_float(*scale))), first = splat(half_to_float(*shift));
  I unordered{};
  for (int i = 0; i < QUANT_GROUP; i += WIDTH) {
    const F v = load<WIDTH>(x + i);
    unordered |= (I)(v != v);
    store_bytes(q + i, round_to_int(clamp((v - first) / step, 0, 15)));
  }
  return is_finite(*scale) && is_finite(*shift) && !has_lanes(unordered);
}

// Whether a format holds the numbers of a type as they are.
template <class B>
static constexpr bool keeps(WeightFormat f) {
  if (f == WeightFormat::int8) return !B::HAS_SHIFT && B::GROUP == QUANT_GROUP;
  return B::NATIVE != NONE && (f == B::NATIVE || (f == WeightFormat::int5 && B::NATIVE == WeightFormat::int4));
}

constexpr int SPAN = 256;  // numbers that are decoded at a time: one large block, or several small ones

// Rounds the scales of a span, or its shifts. Returns whether all are finite.
template <int N>
static INLINE bool round_to_halves(const float* x, uint16_t* half) {
  bool finite = true;
  for (int i = 0; i < N; ++i) half[i] = float_to_half(x[i]);
  for (int i = 0; i < N; ++i) finite &= is_finite(half[i]);
  return finite;
}

// Packs numbers begin .. end - 1 of a row, whose blocks follow. Returns whether all scales and shifts are finite.
template <class B, WeightFormat F>
static bool pack_row(const uint8_t* block, int begin, int end, char* tile, int lane) {
  constexpr int GROUPS = SPAN / B::GROUP;
  alignas(64) int8_t q[SPAN] = {};
  alignas(64) float x[SPAN], scale[GROUPS] = {}, shift[GROUPS] = {};
  alignas(64) uint16_t half_scale[GROUPS], half_shift[GROUPS] = {};
  bool finite = true;
  for (int n; begin < end; begin += n) {
    n = end - begin < SPAN ? end - begin : SPAN;
    for (int i = 0; i < n; i += B::N, block += B::BYTES)
      B::decode(block, q + i, scale + i / B::GROUP, shift + i / B::GROUP);
    if constexpr (has_codebook(B::NATIVE) && !has_codebook(F))
      for (int i = 0; i < n; ++i) q[i] = int8_t(codebook_of(B::NATIVE)[int(q[i])] - excess(B::NATIVE));
    auto store = [&](int g, const uint16_t* s, uint16_t m) {
      store_group(F, reinterpret_cast<uint8_t*>(q) + g * QUANT_GROUP, s, m,
                  tile + (begin / QUANT_GROUP + g) * group_bytes(F), lane);
    };
    if constexpr (keeps<B>(F)) {
      if (!has_shift(F))
        for (int8_t& number : q) number -= B::ZERO;
      finite &= round_to_halves<GROUPS>(scale, half_scale);
      if (has_shift(B::NATIVE)) {  // even where the tile has no shift: what is refused depends on the type alone
        for (int g = 0; B::ZERO && g < GROUPS; ++g) shift[g] = -B::ZERO * scale[g];
        finite &= round_to_halves<GROUPS>(shift, half_shift);
      }
      for (int g = 0; g < n / QUANT_GROUP; ++g) store(g, half_scale + g * scales_per_group(F), half_shift[g]);
      continue;
    }
    dequantize<B>(q, scale, shift, n, x);
    if (F == WeightFormat::float32) {
      float* to = reinterpret_cast<float*>(tile) + begin * TILE_OUT + lane;
      for (int i = 0; i < n; ++i) to[i * TILE_OUT] = x[i];
    } else if (F == WeightFormat::bfloat16) {
      uint32_t* to = reinterpret_cast<uint32_t*>(tile) + begin / 2 * TILE_OUT + lane;
      for (int i = 0; i < n / 2; ++i)
        to[i * TILE_OUT] = float_to_bf16(x[2 * i]) | uint32_t(float_to_bf16(x[2 * i + 1])) << 16;
    } else {
      for (int g = 0; g < n / QUANT_GROUP; ++g) {
        const float* numbers = x + g * QUANT_GROUP;
        int8_t* to = q + g * QUANT_GROUP;
        uint16_t s, m = 0;
        finite &= F == WeightFormat::int8 ? quantize_int8(numbers, to, &s) : quantize_int4(numbers, to, &s, &m);
        store(g, &s, m);
      }
    }
  }
  return finite;
}

// Packs numbers of a row in a format that only some types are converted to. Returns false for others.
template <class B, WeightFormat F>
static bool pack_kept_row(const uint8_t* block, int begin, int end, char* tile, int lane) {
  if constexpr (keeps<B>(F)) return pack_row<B, F>(block, begin, end, tile, lane);
  return false;
}

template <class B>
static bool pack_numbers(const uint8_t* block, int begin, int end, WeightFormat f, char* tile, int lane) {
  switch (f) {
    case WeightFormat::float32: return pack_row<B, WeightFormat::float32>(block, begin, end, tile, lane);
    case WeightFormat::bfloat16: return pack_row<B, WeightFormat::bfloat16>(block, begin, end, tile, lane);
    case WeightFormat::int8: return pack_row<B, WeightFormat::int8>(block, begin, end, tile, lane);
    case WeightFormat::int4: return pack_row<B, WeightFormat::int4>(block, begin, end, tile, lane);
    case WeightFormat::int5: return pack_kept_row<B, WeightFormat::int5>(block, begin, end, tile, lane);
    case WeightFormat::int6: return pack_kept_row<B, WeightFormat::int6>(block, begin, end, tile, lane);
    case WeightFormat::iq4: return pack_kept_row<B, WeightFormat::iq4>(block, begin, end, tile, lane);
    case WeightFormat::mxfp4: return pack_kept_row<B, WeightFormat::mxfp4>(block, begin, end, tile, lane);
    case WeightFormat::nvfp4: return pack_kept_row<B, WeightFormat::nvfp4>(block, begin, end, tile, lane);
  }
  return false;
}

// A row writes 4 of the 64 bytes of a cache line, so a tile is packed in parts that stay in the L1 cache.
constexpr int PART = 2 * SPAN;

template <class B>
static bool pack_rows(const BlockRows& rows, int begin, int end, const PackedWeight& w, char* tile, int lane) {
  bool finite = true;
  for (int from = 0; from < w.in; from += PART)
    for (int row = begin; row < end; ++row) {
      const uint8_t* block = rows.data + row * rows.row_bytes + from / B::N * B::BYTES;
      const int to = w.in - from < PART ? w.in : from + PART;
      finite &= pack_numbers<B>(block, from, to, w.format, tile, lane + row - begin);
    }
  return finite;
}

bool pack_blocks(const BlockRows& rows, int begin, int end, const PackedWeight& w, char* tile, int lane) {
  switch (rows.type) {
    case GgmlType::Q4_0: return pack_rows<Q4_0>(rows, begin, end, w, tile, lane);
    case GgmlType::Q4_1: return pack_rows<Q4_1>(rows, begin, end, w, tile, lane);
    case GgmlType::Q5_0: return pack_rows<Q5_0>(rows, begin, end, w, tile, lane);
    case GgmlType::Q5_1: return pack_rows<Q5_1>(rows, begin, end, w, tile, lane);
    case GgmlType::Q8_0: return pack_rows<Q8_0>(rows, begin, end, w, tile, lane);
    case GgmlType::Q2_K: return pack_rows<Q2_K>(rows, begin, end, w, tile, lane);
    case GgmlType::Q3_K: return pack_rows<Q3_K>(rows, begin, end, w, tile, lane);
    case GgmlType::Q4_K: return pack_rows<Q4_K>(rows, begin, end, w, tile, lane);
    case GgmlType::Q5_K: return pack_rows<Q5_K>(rows, begin, end, w, tile, lane);
    case GgmlType::Q6_K: return pack_rows<Q6_K>(rows, begin, end, w, tile, lane);
    case GgmlType::IQ4_NL: return pack_rows<IQ4_NL>(rows, begin, end, w, tile, lane);
    case GgmlType::IQ4_XS: return pack_rows<IQ4_XS>(rows, begin, end, w, tile, lane);
    case GgmlType::MXFP4: return pack_rows<MXFP4>(rows, begin, end, w, tile, lane);
    case GgmlType::NVFP4: return pack_rows<NVFP4>(rows, begin, end, w, tile, lane);
  }
  return false;
}

}  // namespace retain::RETAIN_ISA
