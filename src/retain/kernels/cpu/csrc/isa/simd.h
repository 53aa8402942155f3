// Vectors of float32 in the vector extensions of GCC and Clang, so that one source serves every instruction set. Each
// set has its own namespace, for the reason in types.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "types.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

namespace retain::RETAIN_ISA {

template <int W>
struct Lanes {
  typedef float f __attribute__((vector_size(4 * W)));
  typedef int32_t i __attribute__((vector_size(4 * W)));
  typedef uint32_t u __attribute__((vector_size(4 * W)));
  typedef uint16_t h __attribute__((vector_size(2 * W)));
};

constexpr int WIDTH = RETAIN_WIDTH;
#ifdef RETAIN_TILES
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif
#ifdef RETAIN_EMULATE_TILES
constexpr bool FEW_REGISTERS = true;  // smaller register blocks, else the emulation takes minutes to compile
#else
constexpr bool FEW_REGISTERS = WIDTH < 16;  // 32 vector registers with AVX-512, 16 elsewhere
#endif
using F = Lanes<WIDTH>::f;
using I = Lanes<WIDTH>::i;

struct bf16 {
  uint16_t bits;
};
struct float16 {  // only scales use it
  uint16_t bits;
};

template <int W>
INLINE typename Lanes<W>::f load(const float* p) {
  typename Lanes<W>::f x;
  memcpy(&x, p, sizeof x);
  return x;
}

template <int W>
INLINE typename Lanes<W>::f load(const bf16* p) {  // a bfloat16 is the upper half of a float32
  typename Lanes<W>::h x;
  memcpy(&x, p, sizeof x);
#ifdef __AVX512BW__  // one shuffle moves the bits to the upper halves; compilers do not find it by themselves
  if constexpr (W == 16) {
    const __m512i from = _mm512_slli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 16);
    return (__m512)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, from, _mm512_castsi256_si512((__m256i)x));
  }
#endif
#ifdef __AVX2__
  if constexpr (W == 8) return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)x), 16);
#endif
  return (typename Lanes<W>::f)(__builtin_convertvector(x, typename Lanes<W>::u) << 16);
}

// Loads finite float16: their bits, moved to a float32's fields, are the number times 2^-112.
template <int W>
INLINE typename Lanes<W>::f load(const float16* p) {
  typename Lanes<W>::h x;
  memcpy(&x, p, sizeof x);
#ifdef __AVX512F__
  if constexpr (W == 16) return (__m512)_mm512_cvtph_ps((__m256i)x);
#endif
  using U = typename Lanes<W>::u;
  U u;
#ifdef __AVX2__  // one instruction; GCC 12 widens by several
  if constexpr (W == 8)
    u = (U)_mm256_cvtepu16_epi32((__m128i)x);
  else
#endif
    u = __builtin_convertvector(x, U);
  const typename Lanes<W>::f magnitude = (typename Lanes<W>::f)((u & 0x7fff) << 13) * 0x1p112f;
  return (typename Lanes<W>::f)((U)magnitude | ((u & 0x8000) << 16));
}

template <int W>
INLINE void store(float* p, typename Lanes<W>::f x) {
  memcpy(p, &x, sizeof x);
}

// Load or store one vector of a row with n numbers left.
INLINE F load_tail(const float* x, int n) {
  if (n >= WIDTH) return load<WIDTH>(x);
  float tail[WIDTH] = {};
  for (int i = 0; i < n; ++i) tail[i] = x[i];
  return load<WIDTH>(tail);
}
INLINE void store_tail(float* x, int n, F y) {
  if (n >= WIDTH) {
    store<WIDTH>(x, y);
  } else {
    for (int i = 0; i < n; ++i) x[i] = y[i];
  }
}

INLINE I load_ints(const int32_t* p) {
  I x;
  memcpy(&x, p, sizeof x);
  return x;
}

INLINE float bits_to_float(int32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) { return bf16_to_float(x.bits); }
INLINE float to_float(float16 x) {
  const uint32_t u = uint32_t(x.bits & 0x7fff) << 13, sign = uint32_t(x.bits & 0x8000) << 16;
  float magnitude;
  memcpy(&magnitude, &u, 4);
  magnitude *= 0x1p112f;
  return sign ? -magnitude : magnitude;
}
INLINE void from_float(float x, float& to) { to = x; }
INLINE void from_float(float x, bf16& to) { to.bits = float_to_bf16(x); }

INLINE F splat(float x) { return x - F{}; }
INLINE I splat(int32_t x) { return x - I{}; }
INLINE F max(F a, F b) { return a > b ? a : b; }
INLINE F absolute(F x) { return (F)((I)x & 0x7fffffff); }
INLINE I round_to_int(F x) {  // for |x| < 2^22: adding 1.5 * 2^23 leaves the integer in the low bits
  return (I)(x + 0x1.8p23f) - 0x4b400000;
}
INLINE I lane_indices() {
  I x;
  for (int l = 0; l < WIDTH; ++l) x[l] = l;
  return x;
}
INLINE void store_bytes(int8_t* p, I x) {
  typedef int8_t Int8 __attribute__((vector_size(WIDTH)));
  const Int8 y = __builtin_convertvector(x, Int8);
  memcpy(p, &y, sizeof y);
}

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(RETAIN_TILES)
constexpr bool MULTIPLIES_BF16 = true;  // an instruction multiplies pairs of bfloat16
#else
constexpr bool MULTIPLIES_BF16 = false;
#endif

// The type of numbers that multiply vectors of T, rounded to T. Where float32 is multiplied, such a number is widened
// once, before all of its products.
template <class T>
using Multiplier = std::conditional_t<MULTIPLIES_BF16, T, float>;

// Rounds to T.
template <class T>
INLINE Multiplier<T> to_multiplier(float x) {
  T rounded;
  from_float(x, rounded);
  if constexpr (std::is_same_v<T, Multiplier<T>>)
    return rounded;
  else
    return to_float(rounded);
}

// Two bfloat16 in each lane. `dot` multiplies them with the two numbers at `a` and adds both products in float32.
template <int W>
struct Bf16Pairs {
  typename Lanes<W>::u bits;
};
template <int W>
INLINE Bf16Pairs<W> load_pairs(const bf16* p) {
  typename Lanes<W>::u bits;  // a vector: GCC fills the struct itself by halves
  memcpy(&bits, p, sizeof bits);
  return {bits};
}
template <int W>
INLINE typename Lanes<W>::f dot(typename Lanes<W>::f sum, const Bf16Pairs<W>& x, const float* a) {
  using F = typename Lanes<W>::f;
  sum += (F)(x.bits << 16) * a[0];
  return sum + (F)(x.bits & 0xffff0000) * a[1];
}
template <int W>
INLINE typename Lanes<W>::f dot(typename Lanes<W>::f sum, const Bf16Pairs<W>& x, const bf16* a) {
  uint32_t pair;
  memcpy(&pair, a, 4);
  const typename Lanes<W>::u y = pair - typename Lanes<W>::u{};
#ifdef __AVX512BF16__
  if constexpr (W == 16) return (__m512)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x.bits, (__m512bh)y);
  if constexpr (W == 8) return (__m256)_mm256_dpbf16_ps((__m256)sum, (__m256bh)x.bits, (__m256bh)y);
#endif
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
  if constexpr (W == 4)
    return (typename Lanes<W>::f)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)x.bits, (bfloat16x8_t)y);
#endif
  using F = typename Lanes<W>::f;
  sum += (F)(x.bits << 16) * (F)(y << 16);
  return sum + (F)(x.bits & 0xffff0000) * (F)(y & 0xffff0000);
}

// Four unsigned bytes in each lane. `dot` multiplies them with the four signed bytes at `a` and adds the products in
// 32 bits, exactly.
#if defined(__AVX512VNNI__)
using Bytes = __m512i;
INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE Bytes low_nibbles(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE Bytes high_nibbles(Bytes x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
INLINE Bytes look_up(const uint8_t* codebook, Bytes places) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)codebook)), places);
}
// low | (high & mask)
INLINE Bytes merge_bits(Bytes low, Bytes high, int mask) {
  return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8(char(mask)), 0xf8);
}
INLINE I dot(I sum, Bytes x, const char* a) {
  int32_t four;
  memcpy(&four, a, 4);
  return (I)_mm512_dpbusd_epi32((__m512i)sum, x, _mm512_set1_epi32(four));
}
#elif defined(__AVX2__)
using Bytes = __m256i;
INLINE Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE Bytes low_nibbles(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
INLINE Bytes high_nibbles(Bytes x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
INLINE Bytes look_up(const uint8_t* codebook, Bytes places) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)codebook)), places);
}
INLINE Bytes merge_bits(Bytes low, Bytes high, int mask) {
  return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(char(mask))));
}
// Two products overflow 16 bits where x is above 127, so the top bit of x is multiplied separately.
INLINE I dot(I sum, Bytes x, const char* a) {
  int32_t four;
  memcpy(&four, a, 4);
  const __m256i y = _mm256_set1_epi32(four);
  const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(x, _mm256_set1_epi8(127)), y);
  const __m256i top = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(x, 7), _mm256_set1_epi8(1)), y);
  return sum + (I)_mm256_madd_epi16(low, _mm256_set1_epi16(1)) + (I)_mm256_madd_epi16(top, _mm256_set1_epi16(128));
}
// The same where all of x are at most 127, so that two products fit into 16 bits.
INLINE I dot_narrow(I sum, Bytes x, const char* a) {
  int32_t four;
  memcpy(&four, a, 4);
  const __m256i pairs = _mm256_maddubs_epi16(x, _mm256_set1_epi32(four));
  return sum + (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
// Sums of products with numbers of 4 bits: eight of them, each of two numbers, fit into 16 bits.
struct NibbleSums {
  __m256i pairs;
};
INLINE void add_products(NibbleSums& sums, Bytes x, const char* a) {
  int32_t four;
  memcpy(&four, a, 4);
  sums.pairs = _mm256_add_epi16(sums.pairs, _mm256_maddubs_epi16(x, _mm256_set1_epi32(four)));
}
INLINE I total(const NibbleSums& sums) { return (I)_mm256_madd_epi16(sums.pairs, _mm256_set1_epi16(1)); }
#define RETAIN_DOT_NARROW
#elif defined(__ARM_FEATURE_DOTPROD)
static_assert(WIDTH == 4, "a NEON vector has four lanes");
using Bytes = uint8x16_t;
INLINE Bytes load_bytes(const uint8_t* p) { return vld1q_u8(p); }
INLINE Bytes low_nibbles(Bytes x) { return vandq_u8(x, vdupq_n_u8(15)); }
INLINE Bytes high_nibbles(Bytes x) { return vshrq_n_u8(x, 4); }
INLINE Bytes look_up(const uint8_t* codebook, Bytes places) { return vqtbl1q_u8(vld1q_u8(codebook), places); }
INLINE Bytes merge_bits(Bytes low, Bytes high, int mask) { return vorrq_u8(low, vandq_u8(high, vdupq_n_u8(mask))); }
INLINE I dot(I sum, Bytes x, const char* a) {
  int32_t four;
  memcpy(&four, a, 4);
  const int8x16_t y = vreinterpretq_s8_s32(vdupq_n_s32(four));
#ifdef __ARM_FEATURE_MATMUL_INT8
  return (I)vusdotq_s32((int32x4_t)sum, x, y);
#else  // both factors are signed, so the top bit of x is multiplied separately
  const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(x, vdupq_n_u8(127)));
  const int8x16_t top = vreinterpretq_s8_u8(vshrq_n_u8(x, 7));
  return (I)vdotq_s32((int32x4_t)sum, low, y) + (I)vdotq_s32(vdupq_n_s32(0), top, y) * 128;
#endif
}
#else
struct Bytes {
  uint8_t data[4 * WIDTH];
};
INLINE Bytes load_bytes(const uint8_t* p) {
  Bytes x;
  memcpy(&x, p, sizeof x);
  return x;
}
INLINE Bytes low_nibbles(Bytes x) {
  for (uint8_t& b : x.data) b &= 15;
  return x;
}
INLINE Bytes high_nibbles(Bytes x) {
  for (uint8_t& b : x.data) b >>= 4;
  return x;
}
INLINE Bytes look_up(const uint8_t* codebook, Bytes places) {
  for (uint8_t& b : places.data) b = codebook[b];
  return places;
}
INLINE Bytes merge_bits(Bytes low, const Bytes& high, int mask) {
  for (int i = 0; i < 4 * WIDTH; ++i) low.data[i] |= high.data[i] & mask;
  return low;
}
INLINE I dot(I sum, const Bytes& x, const char* a) {
  for (int l = 0; l < WIDTH; ++l)
    for (int j = 0; j < 4; ++j) sum[l] += x.data[4 * l + j] * int8_t(a[j]);
  return sum;
}
#endif

// Shifts by `left` bits, to the right if it is negative. Bits of other bytes may come in, so mask the result.
INLINE Bytes shift_bits(Bytes x, int left) {
  typedef uint16_t U16 __attribute__((vector_size(sizeof(Bytes))));
  U16 y;
  memcpy(&y, &x, sizeof y);
  y = left >= 0 ? y << left : y >> -left;
  memcpy(&x, &y, sizeof x);
  return x;
}

#ifdef RETAIN_DOT_NARROW
#undef RETAIN_DOT_NARROW
#else
INLINE I dot_narrow(I sum, const Bytes& x, const char* a) { return dot(sum, x, a); }
struct NibbleSums {
  I sum;
};
INLINE void add_products(NibbleSums& sums, const Bytes& x, const char* a) { sums.sum = dot(sums.sum, x, a); }
INLINE I total(const NibbleSums& sums) { return sums.sum; }
#endif

// Returns float32 whose upper halves are the nearest bfloat16, ties to even.
INLINE Lanes<WIDTH>::u round_to_upper_half(F x) {
  using U = Lanes<WIDTH>::u;
  const U u = (U)x;
  return x == x ? u + 0x7fff + ((u >> 16) & 1) : u | 0x400000;
}
INLINE void store_as(bf16* p, F x) {
#ifdef __AVX512BF16__
  const __m256bh y = _mm512_cvtneps_pbh((__m512)x);
#else
  const auto y = __builtin_convertvector(round_to_upper_half(x) >> 16, Lanes<WIDTH>::h);
#endif
  memcpy(p, &y, sizeof y);
}
INLINE void store_as(float* p, F x) { store<WIDTH>(p, x); }

// Rounds to T and stores.
template <class T>
INLINE void store_multipliers(Multiplier<T>* p, F x) {
  static_assert(std::is_same_v<T, Multiplier<T>> || std::is_same_v<T, bf16>);
  if constexpr (std::is_same_v<T, Multiplier<T>>)
    store_as(p, x);
  else
    store<WIDTH>(p, (F)(round_to_upper_half(x) & 0xffff0000));
}

// Reduce the lanes of a vector to one number, in a fixed order: by halves.
template <int W, class Vector, class Combine>
INLINE auto reduce(Vector x, Combine combine) {
  using Number = std::decay_t<decltype(x[0])>;
  if constexpr (W == 1) {
    return Number(x[0]);
  } else {
    typedef Number Half __attribute__((vector_size(sizeof(Number) * W / 2)));
    Half halves[2];
    memcpy(halves, &x, sizeof x);
    return reduce<W / 2>(Half(combine(halves[0], halves[1])), combine);
  }
}
template <int W, class Vector>
INLINE auto reduce_sum(Vector x) {
  return reduce<W>(x, [](auto a, auto b) { return a + b; });
}
template <int W, class Vector>
INLINE auto reduce_max(Vector x) {
  return reduce<W>(x, [](auto a, auto b) { return a > b ? a : b; });
}
template <int W, class Vector>
INLINE auto reduce_or(Vector x) {
  return reduce<W>(x, [](auto a, auto b) { return a | b; });
}

// Approximations whose results are stored as T. A bfloat16 has 9 bits, so 13 correct bits are enough for it.

// Computes e^x for x below about 80. The relative error is 2e-7 for float32 and 1e-4 for bfloat16. The result is
// exactly 0 below -86, also at -inf.
template <class T>
INLINE F exp(F x) {
  const F magic = splat(0x1.8p23f);  // adding it leaves the nearest integer in the low bits
  const F y = max(splat(-87.0f), x);  // NaN where x is
  F n, p;
  if constexpr (sizeof(T) == 2) {
    const F t = y * 0x1.715476p0f;  // log2 e
    n = t + magic;
    const F r = t - (n - magic);  // minimax for 2^r, |r| <= 1/2
    p = r * 0.0550089292f + 0.242210954f;
    p = p * r + 0.693282902f;
    p = p * r + 1.0f;  // makes e^0 exactly 1
  } else {
    n = y * 0x1.715476p0f + magic;
    const F m = n - magic;
    F r = y - m * 0x1.62e4p-1f;  // ln 2 in two parts; m times the first is exact
    r -= m * 0x1.7f7d1cp-20f;
    p = r * 0x1.10621ep-7f + 0x1.572adap-5f;  // minimax for |r| <= ln 2 / 2, with 1 + r fixed
    p = p * r + 0x1.5557bp-3f;
    p = p * r + 0x1.fffdfap-2f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
  }
  const F e = (F)((I)p + ((I)n << 23));
  return x <= -86.0f ? F{} : e;
}

// Computes ln x of normal x > 0. The relative error is 1e-7 for float32 and 6e-5 for bfloat16, also near ln x = 0.
template <class T>
INLINE F log(F x) {
  const I bits = (I)x, e = (bits - 0x3f400000) >> 23;
  const F f = (F)(bits - (e << 23)) - 1.0f;  // mantissa in [0.75, 1.5), minus 1; minimax for ln(1 + f) / f
  F p;
  if constexpr (sizeof(T) == 2) {
    p = f * 0.138097629f - 0.257927209f;
    p = p * f + 0.3384929f;
    p = p * f - 0.499980807f;
    p = p * f + 0.99994874f;
  } else {
    p = f * 0.0541117303f - 0.120767191f;
    p = p * f + 0.149944976f;
    p = p * f - 0.168243125f;
    p = p * f + 0.199759126f;
    p = p * f - 0.249932185f;
    p = p * f + 0.333335936f;
    p = p * f - 0.500000656f;
    p = p * f + 1.0f;
  }
  return __builtin_convertvector(e, F) * 0x1.62e43p-1f + p * f;
}

// Computes tanh x. The relative error is 3e-7. Near 0, where 1 - 2 / (e^2x + 1) loses digits, by a polynomial of Cephes.
INLINE F tanh(F x) {
  const F a = absolute(x), z = x * x;
  F p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const F y = 1.0f - 2.0f / (exp<float>(2.0f * (a < 10.0f ? a : splat(10.0f))) + 1.0f);
  return a < 0.625f ? x + x * z * p : x < 0.0f ? -y : y;
}

template <class T>
INLINE F reciprocal(F x) {
#ifdef __AVX512F__
  if constexpr (sizeof(T) == 2) return (F)_mm512_rcp14_ps((__m512)x);
#endif
  return 1.0f / x;
}

}  // namespace retain::RETAIN_ISA
