// The inner loops for one instruction set: CMake compiles this file once for each, as RETAIN_ISA with RETAIN_WIDTH
// lanes.
#include "packed_gemm.h"
#include "attention_tile.h"
#include "attention_mass.h"
#include "elementwise.h"

namespace retain::RETAIN_ISA {

bool look(const Attend& a, const Tile& t, int span, float* scratch, float* records, const Seen* seen) {
  return a.kv.type == Type::float32 ? look_at<float>(a, t, span, scratch, records, seen)
                                    : look_at<bf16>(a, t, span, scratch, records, seen);
}

void fold(const Attend& a, const Tile& t, const Seen& seen, const float* factors, float* sums) {
  a.kv.type == Type::float32 ? fold_rows<float>(a, t, seen, factors, sums) : fold_rows<bf16>(a, t, seen, factors, sums);
}

// K goes down a column of its page, V along a row of its own; in bfloat16 two of K's dimensions and two slots of V lie
// together.
template <class From, class To>
static void write_rows(const Write& w, int g, int begin, int end) {
  const int S = w.kv.S, D = w.kv.D;
  constexpr int P = DEEP<To>;
  for (int t = begin; t < end; ++t) {
    const int32_t slot = w.slots[g * w.slot_head + t * w.slot_token];
    const int64_t page = slot / S, place = slot % S;
    const From* k = static_cast<const From*>(w.k.data) + t * w.k.token + g * w.k.head;
    const From* v = static_cast<const From*>(w.v.data) + t * w.v.token + g * w.v.head;
    To* to_k = static_cast<To*>(w.kv.k) + page * S * D + P * place;
    To* to_v = static_cast<To*>(w.kv.v) + page * S * D + place / P * P * D + place % P;
    for (int d = 0; d < D; ++d) from_float(to_float(k[d]), to_k[d / P * P * S + d % P]);
    for (int d = 0; d < D; ++d) from_float(to_float(v[d]), to_v[P * d]);
    w.kv.pos[slot] = w.pos[t];
    for (int c = 0; c < w.kv.columns; ++c) w.kv.mass_page(page)[c * S + place] = 0;
  }
}

void write(const Write& w, int g, int begin, int end) {
  const bool from_float32 = w.k.type == Type::float32, to_float32 = w.kv.type == Type::float32;
  if (from_float32 && to_float32) write_rows<float, float>(w, g, begin, end);
  if (from_float32 && !to_float32) write_rows<float, bf16>(w, g, begin, end);
  if (!from_float32 && to_float32) write_rows<bf16, float>(w, g, begin, end);
  if (!from_float32 && !to_float32) write_rows<bf16, bf16>(w, g, begin, end);
}

void prepare(const Packed& w, const float* x, char* row) { prepare_row(w, x, row); }

void multiply(const Packed& w, int begin, int end, const char* prepared, int rows, const Into& into) {
  switch (w.kind) {
    case Kind::float32: return all_tiles<Kind::float32>(w, begin, end, prepared, rows, into);
    case Kind::bfloat16: return all_tiles<Kind::bfloat16>(w, begin, end, prepared, rows, into);
    case Kind::int8: return all_tiles<Kind::int8>(w, begin, end, prepared, rows, into);
    case Kind::int4: return all_tiles<Kind::int4>(w, begin, end, prepared, rows, into);
  }
}

void lookup(const Packed& w, int64_t index, float factor, bool add, float* out) {
  const char* tile = w.data + index / TILE_OUT * w.tile_bytes();
  for (int i = 0; i < w.in; ++i) {
    const float x = factor * number(w, tile, index % TILE_OUT, i);
    out[i] = add ? out[i] + x : x;
  }
}

void normalise(const Norm& norm, const float* x, int n, bool add, float* out) { normalise_row(norm, x, n, add, out); }

void turn(float* x, const float* angles, int n, bool neighbours) { turn_row(x, angles, n, neighbours); }

void activate(Activation kind, const float* x, const float* times, int n, float* out) {
  switch (kind) {
    case Activation::silu: return activate_row<Activation::silu>(x, times, n, out);
    case Activation::relu: return activate_row<Activation::relu>(x, times, n, out);
    case Activation::gelu: return activate_row<Activation::gelu>(x, times, n, out);
    case Activation::gelu_tanh: return activate_row<Activation::gelu_tanh>(x, times, n, out);
  }
}

}  // namespace retain::RETAIN_ISA
