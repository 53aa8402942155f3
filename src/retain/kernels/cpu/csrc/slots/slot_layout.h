// Where the numbers of a slot are in its page: writes and reads one token.
#pragma once

#include "gemm/gemm.h"
#include "slots/slot_rounding.h"

namespace retain::RETAIN_ISA {

constexpr float LARGEST_VALUE = 0x1p100f;

// A hole has a weight of 0, and 0 times NaN or infinity is NaN. So slots hold neither in V (kernels/slots/pool_dtypes.py).
INLINE float bound_value(float x) {
  const float y = x > LARGEST_VALUE ? LARGEST_VALUE : x < -LARGEST_VALUE ? -LARGEST_VALUE : x;
  return y == y ? y : 0.0f;
}

// Writes a rotated key into its page of keys in 4 bits.
INLINE void sketch_key(const Pool& kv, int64_t page, int64_t offset, const float* rotated) {
  const Pool to = kv.sketched_keys();
  const int S = kv.S, group = slot_group(kv.k_dim);
  int8_t bytes[MAX_K_DIM / 2 + WIDTH];
  for (int d = 0; d < kv.k_dim; d += group)
    to.key_scales(page)[d / group * S + offset] = round_to_nibbles(rotated + d, group, bytes + d / 2);
  uint8_t* const keys = static_cast<uint8_t*>(to.key_page(page)) + 4 * offset;
  for (int d = 0; d < kv.k_dim / 2; d += 4) memcpy(keys + d * S, bytes + d, 4);
}

// The words of a key have a stride in their page, a value is contiguous. Dimensions of K, and slots of V, may be
// interleaved.
template <class To>
INLINE void write_slot(const Pool& kv, int64_t page, int64_t offset, float* k, const float* v) {
  const int stride = kv.key_word_stride(), D = kv.v_dim;
  constexpr int P = INTERLEAVE<To>;
  To* to_k = static_cast<To*>(kv.key_page(page)) + P * kv.key_slot_stride() * offset;
  To* to_v = static_cast<To*>(kv.value_page(page)) + offset / P * P * D + offset % P;
  for (int d = 0; d < kv.k_dim; ++d) from_float(k[d], to_k[d / P * P * stride + d % P]);
  for (int d = 0; d < D; ++d) from_float(v[d], to_v[P * d]);
  if (!kv.sketches) return;
  for (int d = 0; d < kv.k_dim; ++d) k[d] = to_float(to_k[d / P * P * stride + d % P]);
  rotate(k, kv.k_dim);
  sketch_key(kv, page, offset, k);
}

INLINE void write_quantized_slot(const Pool& kv, int64_t page, int64_t offset, float* k, const float* v) {
  const int S = kv.S, key_width = kv.key_width(), value_width = kv.value_width();
  int8_t bytes[MAX_K_DIM + WIDTH];
  auto round = [&](const float* x, int D, int width, uint16_t* scales) {
    const int group = slot_group(D);
    if (width == D) scales[offset] = round_to_bytes(x, D, bytes);
    for (int d = 0; d < D && width < D; d += group)
      scales[d / group * S + offset] = round_to_nibbles(x + d, group, bytes + d / 2);
  };
  rotate(k, kv.k_dim);
  round(k, kv.k_dim, key_width, kv.key_scales(page));
  uint8_t* const keys = static_cast<uint8_t*>(kv.key_page(page)) + 4 * kv.key_slot_stride() * offset;
  for (int d = 0; d < key_width; d += 4) memcpy(keys + d * kv.key_word_stride(), bytes + d, 4);
  if (kv.sketches && key_width == kv.k_dim) {
    const float scale = bf16_to_float(kv.key_scales(page)[offset]);
    for (int d = 0; d < kv.k_dim; ++d) k[d] = scale * (uint8_t(bytes[d]) - 128);
    sketch_key(kv, page, offset, k);
  }
  round(v, kv.v_dim, value_width, kv.value_scales(page));
  uint8_t* const values = static_cast<uint8_t*>(kv.value_page(page)) + offset / 4 * 4 * value_width + offset % 4;
  for (int d = 0; d < value_width; ++d) values[4 * d] = bytes[d];
}

// Writes a token into a slot. `k` is overwritten.
INLINE void write_token(const Pool& kv, int64_t slot, float* k, const float* v, int32_t pos) {
  const int64_t page = slot / kv.S, offset = slot % kv.S;
  switch (kv.dtype) {
    case DType::float32: write_slot<float>(kv, page, offset, k, v); break;
    case DType::bfloat16: write_slot<bf16>(kv, page, offset, k, v); break;
    default: write_quantized_slot(kv, page, offset, k, v); break;
  }
  kv.pos[slot] = pos;
}

template <class From>
INLINE void read_slot(const Pool& kv, int64_t page, int64_t offset, float* k, float* v) {
  const int stride = kv.key_word_stride(), D = kv.v_dim;
  constexpr int P = INTERLEAVE<From>;
  const From* from_k = static_cast<const From*>(kv.key_page(page)) + P * kv.key_slot_stride() * offset;
  const From* from_v = static_cast<const From*>(kv.value_page(page)) + offset / P * P * D + offset % P;
  for (int d = 0; d < kv.k_dim; d += P)
    for (int i = 0; i < P; ++i) k[d + i] = to_float(from_k[d * stride + i]);
  for (int d = 0; d < D; ++d) v[d] = to_float(from_v[P * d]);
}

INLINE void read_quantized_slot(const Pool& kv, int64_t page, int64_t offset, float* k, float* v) {
  const int S = kv.S, key_width = kv.key_width(), value_width = kv.value_width();
  uint8_t bytes[MAX_K_DIM];
  auto dequantize = [&](int D, int width, const uint16_t* scales, float* x) {
    const int half = slot_group(D) / 2;
    const float scale = bf16_to_float(scales[offset]);
    for (int d = 0; d < D && width == D; ++d) x[d] = scale * (bytes[d] - 128);
    for (int d = 0; d < width && width < D; d += half) {
      const float group_scale = bf16_to_float(scales[d / half * S + offset]);
      for (int i = 0; i < half; ++i) {
        x[2 * d + i] = group_scale * ((bytes[d + i] & 15) - 8);
        x[2 * d + half + i] = group_scale * ((bytes[d + i] >> 4) - 8);
      }
    }
  };
  const uint8_t* const keys = static_cast<const uint8_t*>(kv.key_page(page)) + 4 * kv.key_slot_stride() * offset;
  for (int d = 0; d < key_width; d += 4) memcpy(bytes + d, keys + d * kv.key_word_stride(), 4);
  dequantize(kv.k_dim, key_width, kv.key_scales(page), k);
  rotate(k, kv.k_dim);
  const uint8_t* const values =
      static_cast<const uint8_t*>(kv.value_page(page)) + offset / 4 * 4 * value_width + offset % 4;
  for (int d = 0; d < value_width; ++d) bytes[d] = values[4 * d];
  dequantize(kv.v_dim, value_width, kv.value_scales(page), v);
}

INLINE void read_token(const Pool& kv, int64_t slot, float* k, float* v) {
  const int64_t page = slot / kv.S, offset = slot % kv.S;
  switch (kv.dtype) {
    case DType::float32: read_slot<float>(kv, page, offset, k, v); break;
    case DType::bfloat16: read_slot<bf16>(kv, page, offset, k, v); break;
    default: read_quantized_slot(kv, page, offset, k, v); break;
  }
}

// Computes the mean of the values of a group of slots, and how far each is from it.
INLINE void sketch_group(const Pool& kv, int64_t page, int group) {
  const int D = kv.v_dim;
  const int64_t first = page * kv.S + group * SKETCH_GROUP;
  float k[MAX_K_DIM], v[SKETCH_GROUP][MAX_V_DIM], mean[MAX_V_DIM] = {};
  for (int i = 0; i < SKETCH_GROUP; ++i) {
    read_token(kv, first + i, k, v[i]);
    for (int d = 0; d < D; ++d) mean[d] += v[i][d];
  }
  uint16_t* const to = kv.value_means(page) + group * D;
  for (int d = 0; d < D; ++d) {
    to[d] = float_to_bf16(mean[d] / SKETCH_GROUP);
    mean[d] = bf16_to_float(to[d]);
  }
  for (int i = 0; i < SKETCH_GROUP; ++i) {
    float squares = 0;
    for (int d = 0; d < D; ++d) squares += (v[i][d] - mean[d]) * (v[i][d] - mean[d]);
    const float distance = __builtin_sqrtf(squares);
    kv.deviations(page)[group * SKETCH_GROUP + i] = float_to_bf16(distance < LARGEST_VALUE ? distance : LARGEST_VALUE);
  }
}

}  // namespace retain::RETAIN_ISA
