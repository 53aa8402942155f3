// The kernels of one instruction set. CMake compiles this file once for each set, with RETAIN_ISA as the namespace and
// RETAIN_WIDTH lanes in a vector.
#include "attention_mass.h"
#include "attention_tile.h"
#include "dequantized_gemm.h"
#include "elementwise.h"
#include "packed_gemm.h"
#ifdef RETAIN_TILES
#include "packed_tile_gemm.h"
#endif
#include "slot_layout.h"

namespace retain::RETAIN_ISA {

void gather_queries(const AttentionArgs& args, const QueryTile& tile, float* scratch) {
  switch (args.kv.dtype) {
    case DType::float32: return gather_queries_impl<float>(args, tile, scratch);
    case DType::bfloat16: return gather_queries_impl<bf16>(args, tile, scratch);
    case DType::int8: return gather_queries_impl<uint8_t>(args, tile, scratch);
    case DType::k8v4: return gather_queries_impl<K8V4>(args, tile, scratch);
    case DType::int4: return gather_queries_impl<Nibbles>(args, tile, scratch);
  }
}

bool attend_tile(const AttentionArgs& args, const QueryTile& tile, int block, float* scratch, float* partials,
                 const MassBuffers* mass) {
  switch (args.kv.dtype) {
    case DType::float32: return attend_tile_impl<float>(args, tile, block, scratch, partials, mass);
    case DType::bfloat16: return attend_tile_impl<bf16>(args, tile, block, scratch, partials, mass);
    case DType::int8: return attend_tile_impl<uint8_t>(args, tile, block, scratch, partials, mass);
    case DType::k8v4: return attend_tile_impl<K8V4>(args, tile, block, scratch, partials, mass);
    case DType::int4: return attend_tile_impl<Nibbles>(args, tile, block, scratch, partials, mass);
  }
  return false;
}

void merge_partials(float* total, const float* next, int rows, int D) { merge_partials_impl(total, next, rows, D); }

void reduce_mass(const AttentionArgs& args, const QueryTile& tile, const MassBuffers& mass, const float* factors,
                 float decay) {
  args.kv.dtype == DType::float32 ? reduce_mass_impl<Weight<float>>(args, tile, mass, factors, decay)
                                  : reduce_mass_impl<Weight<bf16>>(args, tile, mass, factors, decay);
}

template <class From>
static void write_rows(const WriteArgs& w, int g, int begin, int end) {
  const Pool& kv = w.kv;
  float k[MAX_K_DIM], v[MAX_V_DIM];
  for (int t = begin; t < end; ++t) {
    const int32_t slot = w.slots[g * w.slot_head_stride + t * w.slot_token_stride];
    const From* from_k = static_cast<const From*>(w.k.data) + t * w.k.token_stride + g * w.k.head_stride;
    const From* from_v = static_cast<const From*>(w.v.data) + t * w.v.token_stride + g * w.v.head_stride;
    for (int d = 0; d < kv.k_dim; ++d) k[d] = to_float(from_k[d]);
    for (int d = 0; d < kv.v_dim; ++d) v[d] = bound_value(to_float(from_v[d]));
    write_token(kv, slot, k, v, w.pos[t]);
    for (int c = 0; c < kv.mass_columns; ++c) kv.mass_page(slot / kv.S)[c * kv.S + slot % kv.S] = 0;
  }
}

void write(const WriteArgs& w, int g, int begin, int end) {
  w.k.dtype == DType::float32 ? write_rows<float>(w, g, begin, end) : write_rows<bf16>(w, g, begin, end);
}

void read_slots(const Pool& kv, const int64_t* slots, int64_t n, float* k, float* v) {
  for (int64_t i = 0; i < n; ++i) read_token(kv, slots[i], k + i * kv.k_dim, v + i * kv.v_dim);
}

void requantize(const RequantizeArgs& r, int64_t begin, int64_t end) {
  float k[MAX_K_DIM], v[MAX_V_DIM];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t src = r.src[i], dst = r.dst[i];
    read_token(r.kv, src, k, v);
    write_token(r.to, dst, k, v, r.pos[i]);
    const float* mass = r.kv.mass_page(src / r.kv.S) + src % r.kv.S;
    float* to_mass = r.to.mass_page(dst / r.to.S) + dst % r.to.S;
    for (int c = 0; c < r.to.mass_columns; ++c) to_mass[c * r.to.S] = mass[c * r.kv.S];
  }
}

int64_t activation_bytes(const PackedWeight& w) { return row_bytes(w); }

void prepare_activations(const PackedWeight& w, const float* x, char* row) { prepare_row(w, x, row); }

void packed_gemm(const PackedWeight& w, int begin, int end, const char* prepared, int rows, const OutputView& out) {
  if (w.is_dequantized()) return gemm_dequantized(w, begin, end, prepared, rows, out);
#ifdef RETAIN_TILES
  if (gemm_by_tiles(w, begin, end, prepared, rows, out)) return;
#endif
  switch (w.format) {
    case WeightFormat::float32: return gemm_tiles<WeightFormat::float32>(w, begin, end, prepared, rows, out);
    case WeightFormat::bfloat16: return gemm_tiles<WeightFormat::bfloat16>(w, begin, end, prepared, rows, out);
    case WeightFormat::int8: return gemm_tiles<WeightFormat::int8>(w, begin, end, prepared, rows, out);
    case WeightFormat::int4: return gemm_tiles<WeightFormat::int4>(w, begin, end, prepared, rows, out);
    case WeightFormat::iq4: return gemm_tiles<WeightFormat::iq4>(w, begin, end, prepared, rows, out);
    case WeightFormat::mxfp4: return gemm_tiles<WeightFormat::mxfp4>(w, begin, end, prepared, rows, out);
    case WeightFormat::int5: return gemm_tiles<WeightFormat::int5>(w, begin, end, prepared, rows, out);
    case WeightFormat::int6: return gemm_tiles<WeightFormat::int6>(w, begin, end, prepared, rows, out);
    case WeightFormat::nvfp4: return gemm_tiles<WeightFormat::nvfp4>(w, begin, end, prepared, rows, out);
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
    case Activation::sigmoid: return activate_row<Activation::sigmoid>(x, gate, n, out);
    case Activation::relu2: return activate_row<Activation::relu2>(x, gate, n, out);
    case Activation::swiglu_oai: return activate_row<Activation::swiglu_oai>(x, gate, n, out);
  }
}

}  // namespace retain::RETAIN_ISA
