// The kernels of one instruction set. CMake compiles this file once for each set, with RETAIN_ISA as the namespace and
// RETAIN_WIDTH lanes in a vector.
#include "attention_mass.h"
#include "attention_tile.h"
#include "elementwise.h"
#include "packed_gemm.h"
#ifdef RETAIN_TILES
#include "packed_tile_gemm.h"
#endif

namespace retain::RETAIN_ISA {

bool attend_tile(const AttentionArgs& args, const QueryTile& tile, int block, float* scratch, float* partials,
                 const MassBuffers* mass) {
  switch (args.kv.dtype) {
    case DType::float32: return attend_tile_impl<float>(args, tile, block, scratch, partials, mass);
    case DType::bfloat16: return attend_tile_impl<bf16>(args, tile, block, scratch, partials, mass);
    case DType::int8: return attend_tile_impl<uint8_t>(args, tile, block, scratch, partials, mass);
  }
  return false;
}

void merge_partials(float* total, const float* next, int rows, int D) { merge_partials_impl(total, next, rows, D); }

void reduce_mass(const AttentionArgs& args, const QueryTile& tile, const MassBuffers& mass, const float* factors,
                 float* sums) {
  args.kv.dtype == DType::float32 ? reduce_mass_impl<Weight<float>>(args, tile, mass, factors, sums)
                                  : reduce_mass_impl<Weight<bf16>>(args, tile, mass, factors, sums);
}

// Converts the numbers of a slot to the pool's dtype.
template <class To>
struct SlotRounding {
  template <class From>
  INLINE SlotRounding(const From*, int) {}
  INLINE To operator()(float x) const {
    To y;
    from_float(x, y);
    return y;
  }
  INLINE void store_scale(uint16_t*) const {}
};

// The rule is kernels/int8_slots.py's, to the bit.
template <>
struct SlotRounding<uint8_t> {
  uint16_t scale;
  float factor;

  template <class From>
  INLINE SlotRounding(const From* x, int n) {
    float largest = 0;
    for (int i = 0; i < n; ++i) largest = __builtin_fmaxf(largest, __builtin_fabsf(to_float(x[i])));
    scale = float_to_bf16(largest / 127.0f);
    const float rounded = bf16_to_float(scale);
    factor = rounded > 0x1p-100f ? 1.0f / rounded : 0.0f;
  }
  INLINE uint8_t operator()(float x) const {
    const float y = __builtin_rintf(x * factor);
    return uint8_t(128 + int(y < -127.0f ? -127.0f : y > 127.0f ? 127.0f : y));
  }
  INLINE void store_scale(uint16_t* to) const { *to = scale; }
};

// A key is strided by S in its page, a value is contiguous. Dimensions of K, and slots of V, may be interleaved.
template <class From, class To>
static void write_rows(const WriteArgs& w, int g, int begin, int end) {
  const int S = w.kv.S, D = w.kv.D;
  constexpr int P = INTERLEAVE<To>;
  for (int t = begin; t < end; ++t) {
    const int32_t slot = w.slots[g * w.slot_head_stride + t * w.slot_token_stride];
    const int64_t page = slot / S, offset = slot % S;
    const From* k = static_cast<const From*>(w.k.data) + t * w.k.token_stride + g * w.k.head_stride;
    const From* v = static_cast<const From*>(w.v.data) + t * w.v.token_stride + g * w.v.head_stride;
    To* to_k = static_cast<To*>(w.kv.key_page(page)) + P * offset;
    To* to_v = static_cast<To*>(w.kv.value_page(page)) + offset / P * P * D + offset % P;
    float key[MAX_HEAD_DIM];
    for (int d = 0; d < D; ++d) key[d] = to_float(k[d]);
    if constexpr (sizeof(To) == 1) rotate(key, D);
    const SlotRounding<To> round_k(key, D), round_v(v, D);
    for (int d = 0; d < D; ++d) to_k[d / P * P * S + d % P] = round_k(key[d]);
    for (int d = 0; d < D; ++d) to_v[P * d] = round_v(to_float(v[d]));
    round_k.store_scale(w.kv.scales(w.kv.key_page(page)) + offset);
    round_v.store_scale(w.kv.scales(w.kv.value_page(page)) + offset);
    w.kv.pos[slot] = w.pos[t];
    for (int c = 0; c < w.kv.mass_columns; ++c) w.kv.mass_page(page)[c * S + offset] = 0;
  }
}

template <class From>
static void write_rows_from(const WriteArgs& w, int g, int begin, int end) {
  switch (w.kv.dtype) {
    case DType::float32: return write_rows<From, float>(w, g, begin, end);
    case DType::bfloat16: return write_rows<From, bf16>(w, g, begin, end);
    case DType::int8: return write_rows<From, uint8_t>(w, g, begin, end);
  }
}

void write(const WriteArgs& w, int g, int begin, int end) {
  w.k.dtype == DType::float32 ? write_rows_from<float>(w, g, begin, end) : write_rows_from<bf16>(w, g, begin, end);
}

void prepare_activations(const PackedWeight& w, const float* x, char* row) { prepare_row(w, x, row); }

void packed_gemm(const PackedWeight& w, int begin, int end, const char* prepared, int rows, const OutputView& out) {
#ifdef RETAIN_TILES
  if (gemm_by_tiles(w, begin, end, prepared, rows, out)) return;
#endif
  switch (w.format) {
    case WeightFormat::float32: return gemm_tiles<WeightFormat::float32>(w, begin, end, prepared, rows, out);
    case WeightFormat::bfloat16: return gemm_tiles<WeightFormat::bfloat16>(w, begin, end, prepared, rows, out);
    case WeightFormat::int8: return gemm_tiles<WeightFormat::int8>(w, begin, end, prepared, rows, out);
    case WeightFormat::int4: return gemm_tiles<WeightFormat::int4>(w, begin, end, prepared, rows, out);
  }
}

void unpack_row(const PackedWeight& w, int64_t index, float factor, bool add, float* out) {
  const char* tile = w.data + index / TILE_OUT * w.tile_bytes();
  for (int i = 0; i < w.in; ++i) {
    const float x = factor * unpack_number(w, tile, index % TILE_OUT, i);
    out[i] = add ? out[i] + x : x;
  }
}

void normalize(const NormParams& norm, const float* x, int n, bool add, float* out) {
  normalize_row(norm, x, n, add, out);
}

void rope(float* x, const float* angles, int n, bool interleaved) { rope_row(x, angles, n, interleaved); }

void activate(Activation kind, const float* x, const float* gate, int n, float* out) {
  switch (kind) {
    case Activation::silu: return activate_row<Activation::silu>(x, gate, n, out);
    case Activation::relu: return activate_row<Activation::relu>(x, gate, n, out);
    case Activation::gelu: return activate_row<Activation::gelu>(x, gate, n, out);
    case Activation::gelu_tanh: return activate_row<Activation::gelu_tanh>(x, gate, n, out);
  }
}

}  // namespace retain::RETAIN_ISA
