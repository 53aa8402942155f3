// The inner loops for one instruction set: CMake compiles this file once for each, as RETAIN_ISA with RETAIN_WIDTH
// lanes.
#include "look.h"

namespace retain::RETAIN_ISA {

bool look(const Attend& a, const Tile& t, int span, float* scratch, float* records) {
  return a.kv.type == Type::float32 ? look_at<float>(a, t, span, scratch, records)
                                    : look_at<bf16>(a, t, span, scratch, records);
}

// K goes down a column of its page, V along a row of its own.
template <class From, class To>
static void write_rows(const Write& w, int g, int begin, int end) {
  const int S = w.kv.S, D = w.kv.D;
  for (int t = begin; t < end; ++t) {
    const int32_t slot = w.slots[g * w.slot_head + t * w.slot_token];
    const int64_t page = slot / S, place = slot % S;
    const From* k = static_cast<const From*>(w.k.data) + t * w.k.token + g * w.k.head;
    const From* v = static_cast<const From*>(w.v.data) + t * w.v.token + g * w.v.head;
    To* to_k = static_cast<To*>(w.kv.k) + page * S * D + place;
    To* to_v = static_cast<To*>(w.kv.v) + page * S * D + place * D;
    for (int d = 0; d < D; ++d) from_float(to_float(k[d]), to_k[d * S]);
    for (int d = 0; d < D; ++d) from_float(to_float(v[d]), to_v[d]);
    w.kv.pos[slot] = w.pos[t];
  }
}

void write(const Write& w, int g, int begin, int end) {
  const bool from_float32 = w.k.type == Type::float32, to_float32 = w.kv.type == Type::float32;
  if (from_float32 && to_float32) write_rows<float, float>(w, g, begin, end);
  if (from_float32 && !to_float32) write_rows<float, bf16>(w, g, begin, end);
  if (!from_float32 && to_float32) write_rows<bf16, float>(w, g, begin, end);
  if (!from_float32 && !to_float32) write_rows<bf16, bf16>(w, g, begin, end);
}

}  // namespace retain::RETAIN_ISA
