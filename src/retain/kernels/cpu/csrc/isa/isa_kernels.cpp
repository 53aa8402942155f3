// The kernels of one instruction set for weights and activations. CMake compiles this file once for each set, with
// RETAIN_ISA as the namespace and RETAIN_WIDTH lanes in a vector.
#include "gemm/dequantized_gemm.h"
#include "isa/elementwise.h"
#include "gemm/packed_gemm.h"
#ifdef RETAIN_TILES
#include "gemm/packed_tile_gemm.h"
#endif

namespace retain::RETAIN_ISA {

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

void add_low_rank(const LowRank& p, int adapter, const float* const* x, float* const* out, int rows) {
  p.is_bfloat16 ? low_rank_rows<bf16>(p, adapter, x, out, rows) : low_rank_rows<float>(p, adapter, x, out, rows);
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
