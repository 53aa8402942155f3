// The kernels of one instruction set that touch slots: attention, masses, writes and reads. CMake compiles this file
// once for each set, beside isa_kernels.cpp.
#include "attention/attention_mass.h"
#include "attention/attention_tile.h"
#include "attention/look_weights.h"
#include "slots/slot_layout.h"

namespace retain::RETAIN_ISA {

static_assert(std::is_same_v<QueriesOf<K8V4>, QueriesOf<uint8_t>>);
static_assert(std::is_same_v<QueriesOf<Nibbles>, QueriesOf<uint8_t>>);

void gather_queries(const AttentionArgs& args, const QueryTile& tile, float* scratch) {
  switch (args.kv.dtype) {
    case DType::float32: return gather_queries_impl<float>(args, tile, scratch);
    case DType::bfloat16: return gather_queries_impl<bf16>(args, tile, scratch);
    case DType::int8:
    case DType::k8v4:
    case DType::int4: return gather_queries_impl<uint8_t>(args, tile, scratch);
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

void look_weights(const AttentionArgs& args, const QueryTile& tile, const LookPart& part, float* scratch,
                  float* maxima, float* sums) {
  look_weights_impl(args, tile, part, scratch, maxima, sums);
}

void look_priorities(const AttentionArgs& args, const QueryTile& tile, const LookPart& part, const float* factors,
                     float* priorities) {
  look_priorities_impl(args, tile, part, factors, priorities);
}

void gather_slots(const Pool& from, const int32_t* table, const int32_t* places, int64_t n, const Pool& to) {
  switch (from.dtype) {
    case DType::float32: return gather_slots_impl<1>(from, table, places, n, to);
    case DType::bfloat16: return gather_slots_impl<2>(from, table, places, n, to);
    default: return gather_slots_impl<4>(from, table, places, n, to);
  }
}

void gather_records(const Pool& from, const char* records, int64_t n, const Pool& to) {
  switch (from.dtype) {
    case DType::float32: return gather_records_impl<uint32_t>(from, records, n, to);
    case DType::bfloat16: return gather_records_impl<uint16_t>(from, records, n, to);
    default: return gather_records_impl<uint8_t>(from, records, n, to);
  }
}

void sum_means(const AttentionArgs& args, const QueryTile& tile, const LookPart& part, const float* maxima,
               const float* priorities, float highest, float* partials) {
  sum_means_impl(args, tile, part, maxima, priorities, highest, partials);
}

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

void sketch_values(const Pool& kv, int64_t slot) {
  if (kv.pos[slot | (SKETCH_GROUP - 1)] >= 0) sketch_group(kv, slot / kv.S, slot % kv.S / SKETCH_GROUP);
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

}  // namespace retain::RETAIN_ISA
