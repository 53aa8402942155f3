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
  return args.kv.dtype == DType::float32 ? attend_tile_impl<float>(args, tile, block, scratch, partials, mass)
                                         : attend_tile_impl<bf16>(args, tile, block, scratch, partials, mass);
}

void merge_partials(float* total, const float* next, int rows, int D) { merge_partials_impl(total, next, rows, D); }

void reduce_mass(const AttentionArgs& args, const QueryTile& tile, const MassBuffers& mass, const float* factors,
                 float* sums) {
  args.kv.dtype == DType::float32 ? reduce_mass_impl<float>(args, tile, mass, factors, sums)
                                  : reduce_mass_impl<bf16>(args, tile, mass, factors, sums);
}

// A key is strided by S in its page, a value is contiguous. In bfloat16 two dimensions of K are interleaved, and two
// slots of V.
template <class From, class To>
static void write_rows(const WriteArgs& w, int g, int begin, int end) {
  const int S = w.kv.S, D = w.kv.D;
  constexpr int P = INTERLEAVE<To>;
  for (int t = begin; t < end; ++t) {
    const int32_t slot = w.slots[g * w.slot_head_stride + t * w.slot_token_stride];
    const int64_t page = slot / S, offset = slot % S;
    const From* k = static_cast<const From*>(w.k.data) + t * w.k.token_stride + g * w.k.head_stride;
    const From* v = static_cast<const From*>(w.v.data) + t * w.v.token_stride + g * w.v.head_stride;
    To* to_k = static_cast<To*>(w.kv.k) + page * S * D + P * offset;
    To* to_v = static_cast<To*>(w.kv.v) + page * S * D + offset / P * P * D + offset % P;
    for (int d = 0; d < D; ++d) from_float(to_float(k[d]), to_k[d / P * P * S + d % P]);
    for (int d = 0; d < D; ++d) from_float(to_float(v[d]), to_v[P * d]);
    w.kv.pos[slot] = w.pos[t];
    for (int c = 0; c < w.kv.mass_columns; ++c) w.kv.mass_page(page)[c * S + offset] = 0;
  }
}

void write(const WriteArgs& w, int g, int begin, int end) {
  const bool from_float32 = w.k.dtype == DType::float32, to_float32 = w.kv.dtype == DType::float32;
  if (from_float32 && to_float32) write_rows<float, float>(w, g, begin, end);
  if (from_float32 && !to_float32) write_rows<float, bf16>(w, g, begin, end);
  if (!from_float32 && to_float32) write_rows<bf16, float>(w, g, begin, end);
  if (!from_float32 && !to_float32) write_rows<bf16, bf16>(w, g, begin, end);
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
