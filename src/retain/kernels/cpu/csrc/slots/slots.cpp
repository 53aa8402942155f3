// The kernels `write`, `read_slots`, `requantize`, `copy` and `move`: put tokens into slots, read and copy them.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kernels.h"
#include "slots/resident_slots.h"

namespace retain {

constexpr int CHUNK = 64;                       // tokens that one thread writes or reads at a time
constexpr int64_t MIN_PARALLEL_SIZE = 1 << 15;  // numbers to write, or bytes to copy

// Updates what a pool with sketches has beside the K and V of slot i of n that were written. Where another of them ends
// the group, as in a prompt, that one computes the sketches of its values.
template <class Slot>
static void note_written(const Pool& kv, const Slot* slots, int64_t i, int64_t n, int64_t stride = 1) {
  const int64_t slot = slots[i * stride], last = i + SKETCH_GROUP - 1 - slot % SKETCH_GROUP;
  const bool is_followed = last > i && last < n && slots[last * stride] - slot == last - i;
  if (!is_followed) selected_isa().sketch_values(kv, slot);
  if (kv.resident) kv.resident->forget(slot);
}

void check(const WriteArgs& w) {
  const int64_t num_slots = w.kv.num_pages * w.kv.S;
  for (int g = 0; g < w.G; ++g)
    for (int t = 0; t < w.T; ++t) {
      const int32_t slot = w.slots[g * w.slot_head_stride + t * w.slot_token_stride];
      if (slot < 0 || slot >= num_slots) throw std::invalid_argument("slot_mapping names a slot outside the pool");
    }
}

void write(const WriteArgs& w) {
  check(w);
  const IsaKernels& isa = selected_isa();
  const int chunks = (w.T + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(dynamic) if (int64_t(w.T) * w.G * w.kv.k_dim > MIN_PARALLEL_SIZE)
  for (int i = 0; i < w.G * chunks; ++i) {
    const int begin = i % chunks * CHUNK;
    isa.write(w, i / chunks, begin, std::min(w.T, begin + CHUNK));
  }
  for (int t = 0; t < w.T && w.kv.sketches; ++t) sketch_token(w, t);
}

void sketch_token(const WriteArgs& w, int t) {
  for (int g = 0; g < w.G; ++g) note_written(w.kv, w.slots + g * w.slot_head_stride, t, w.T, w.slot_token_stride);
}

static void check(const Pool& kv, const int64_t* slots, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (slots[i] < 0 || slots[i] >= kv.num_pages * kv.S) throw std::invalid_argument("a slot is outside the pool");
}

void read_slots(const Pool& kv, const int64_t* slots, int64_t n, float* k, float* v) {
  check(kv, slots, n);
  const IsaKernels& isa = selected_isa();
#pragma omp parallel for schedule(dynamic) if (n * kv.k_dim > MIN_PARALLEL_SIZE)
  for (int64_t i = 0; i < n; i += CHUNK)
    isa.read_slots(kv, slots + i, std::min<int64_t>(CHUNK, n - i), k + i * kv.k_dim, v + i * kv.v_dim);
}

void requantize(const RequantizeArgs& r) {
  check(r.kv, r.src, r.n);
  check(r.to, r.dst, r.n);
  const IsaKernels& isa = selected_isa();
#pragma omp parallel for schedule(dynamic) if (r.n * r.kv.k_dim > MIN_PARALLEL_SIZE)
  for (int64_t i = 0; i < r.n; i += CHUNK) isa.requantize(r, i, std::min(r.n, i + CHUNK));
  for (int64_t i = 0; i < r.n && r.to.sketches; ++i) note_written(r.to, r.dst, i, r.n);
}

void copy(const Pool& kv, const int64_t* src, const int64_t* dst, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (std::min(src[i], dst[i]) < 0 || std::max(src[i], dst[i]) >= kv.num_pages)
      throw std::invalid_argument("src or dst names a page outside the pool");
  const int64_t key_bytes = kv.key_bytes(), value_bytes = kv.value_bytes();
#pragma omp parallel for if (n * key_bytes > MIN_PARALLEL_SIZE)
  for (int64_t i = 0; i < n; ++i) {
    memcpy(kv.key_page(dst[i]), kv.key_page(src[i]), key_bytes);
    memcpy(kv.value_page(dst[i]), kv.value_page(src[i]), value_bytes);
    if (kv.sketches)
      memcpy(kv.sketches + dst[i] * kv.sketch_stride, kv.sketches + src[i] * kv.sketch_stride, kv.sketch_stride);
    if (kv.resident) kv.resident->forget_page(dst[i], kv.S);
    memcpy(kv.pos + dst[i] * kv.S, kv.pos + src[i] * kv.S, size_t(kv.S) * sizeof(int32_t));
    memcpy(kv.mass_page(dst[i]), kv.mass_page(src[i]), size_t(kv.mass_columns) * kv.S * sizeof(float));
  }
}

// Copies slot i of page a to slot j of page b. INTERLEAVE dimensions of K, and slots of V, are interleaved (see Pool).
template <class T, int INTERLEAVE>
static void move_slot(const Pool& kv, int64_t from, int64_t to) {
  constexpr int P = INTERLEAVE;
  const int S = kv.S, stride = kv.key_word_stride(), slot_stride = kv.key_slot_stride(), value_width = kv.value_width();
  const int64_t a = from / S, b = to / S, i = from % S, j = to % S;
  const T* k = static_cast<const T*>(kv.key_page(a)) + P * slot_stride * i;
  const T* v = static_cast<const T*>(kv.value_page(a)) + i / P * P * value_width + i % P;
  T* to_k = static_cast<T*>(kv.key_page(b)) + P * slot_stride * j;
  T* to_v = static_cast<T*>(kv.value_page(b)) + j / P * P * value_width + j % P;
  for (int d = 0; d < kv.key_width(); ++d) to_k[d / P * P * stride + d % P] = k[d / P * P * stride + d % P];
  for (int d = 0; d < value_width; ++d) to_v[P * d] = v[P * d];
  if (kv.is_quantized()) {
    const int key_scales = kv.num_key_scales(), value_scales = kv.num_value_scales();
    for (int g = 0; g < key_scales; ++g) kv.key_scales(b)[g * S + j] = kv.key_scales(a)[g * S + i];
    for (int g = 0; g < value_scales; ++g) kv.value_scales(b)[g * S + j] = kv.value_scales(a)[g * S + i];
  }
  kv.pos[to] = kv.pos[from];
  for (int c = 0; c < kv.mass_columns; ++c) kv.mass_page(b)[c * S + j] = kv.mass_page(a)[c * S + i];
}

static void copy_sketched_key(const Pool& kv, int64_t from, int64_t to) {
  const Pool p = kv.sketched_keys();
  const int S = p.S;
  const uint8_t* k = static_cast<const uint8_t*>(p.key_page(from / S)) + 4 * (from % S);
  uint8_t* to_k = static_cast<uint8_t*>(p.key_page(to / S)) + 4 * (to % S);
  for (int d = 0; d < p.key_width(); d += 4) memcpy(to_k + d * S, k + d * S, 4);
  for (int g = 0; g < p.num_key_scales(); ++g)
    p.key_scales(to / S)[g * S + to % S] = p.key_scales(from / S)[g * S + from % S];
}

void move(const Pool& kv, const int32_t* src, const int32_t* dst, int64_t lists, int64_t n) {
  for (int64_t i = 0; i < lists * n; ++i)
    if (std::min(src[i], dst[i]) < 0 || std::max(src[i], dst[i]) >= kv.num_pages * kv.S)
      throw std::invalid_argument("src or dst names a slot outside the pool");
#pragma omp parallel for schedule(dynamic) if (lists * n * kv.k_dim > MIN_PARALLEL_SIZE)
  for (int64_t l = 0; l < lists; ++l)
    for (int64_t i = l * n; i < (l + 1) * n; ++i) {
      if (src[i] == dst[i]) continue;
      switch (kv.dtype) {
        case DType::float32: move_slot<float, 1>(kv, src[i], dst[i]); break;
        case DType::bfloat16: move_slot<uint16_t, 2>(kv, src[i], dst[i]); break;
        default: move_slot<uint8_t, 4>(kv, src[i], dst[i]); break;
      }
      if (kv.sketches && kv.dtype != DType::int4) copy_sketched_key(kv, src[i], dst[i]);
    }
  for (int64_t i = 0; i < lists * n && kv.sketches; ++i) note_written(kv, dst, i, lists * n);
}

}  // namespace retain
