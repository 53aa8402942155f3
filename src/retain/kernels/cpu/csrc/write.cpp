// write, copy and move: bytes into pages.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kernels.h"

namespace retain {

constexpr int STRETCH = 64;                  // tokens that one core writes at a time
constexpr int64_t WORTH_WAKING = 1 << 15;    // numbers written, or bytes copied

void check(const Write& w) {
  const int64_t n_slots = w.kv.n_pages * w.kv.S;
  for (int g = 0; g < w.G; ++g)
    for (int t = 0; t < w.T; ++t) {
      const int32_t slot = w.slots[g * w.slot_head + t * w.slot_token];
      if (slot < 0 || slot >= n_slots) throw std::invalid_argument("slots names a slot outside the pool");
    }
}

void write(const Write& w) {
  check(w);
  const Isa& inner = isa();
  const int stretches = (w.T + STRETCH - 1) / STRETCH;
#pragma omp parallel for schedule(dynamic) if (int64_t(w.T) * w.G * w.kv.D > WORTH_WAKING)
  for (int i = 0; i < w.G * stretches; ++i) {
    const int begin = i % stretches * STRETCH;
    inner.write(w, i / stretches, begin, std::min(w.T, begin + STRETCH));
  }
}

void copy(const Pool& kv, const int64_t* src, const int64_t* dst, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (std::min(src[i], dst[i]) < 0 || std::max(src[i], dst[i]) >= kv.n_pages)
      throw std::invalid_argument("src or dst names a page outside the pool");
  const size_t page = size_t(kv.S) * kv.D * bytes(kv.type);
#pragma omp parallel for if (n * int64_t(page) > WORTH_WAKING)
  for (int64_t i = 0; i < n; ++i) {
    memcpy(const_cast<void*>(kv.key_page(dst[i])), kv.key_page(src[i]), page);
    memcpy(const_cast<void*>(kv.value_page(dst[i])), kv.value_page(src[i]), page);
    memcpy(kv.pos + dst[i] * kv.S, kv.pos + src[i] * kv.S, size_t(kv.S) * sizeof(int32_t));
    memcpy(kv.mass_page(dst[i]), kv.mass_page(src[i]), size_t(kv.columns) * kv.S * sizeof(float));
  }
}

// In bfloat16 two of K's dimensions and two slots of V lie together (inner.h).
template <class T, int PAIR>
static void move_slot(const Pool& kv, int64_t from, int64_t to) {
  const int S = kv.S, D = kv.D;
  const int64_t a = from / S, b = to / S, i = from % S, j = to % S;
  const T* k = static_cast<const T*>(kv.k) + a * S * D + PAIR * i;
  const T* v = static_cast<const T*>(kv.v) + a * S * D + i / PAIR * PAIR * D + i % PAIR;
  T* to_k = static_cast<T*>(kv.k) + b * S * D + PAIR * j;
  T* to_v = static_cast<T*>(kv.v) + b * S * D + j / PAIR * PAIR * D + j % PAIR;
  for (int d = 0; d < D; ++d) to_k[d / PAIR * PAIR * S + d % PAIR] = k[d / PAIR * PAIR * S + d % PAIR];
  for (int d = 0; d < D; ++d) to_v[PAIR * d] = v[PAIR * d];
  kv.pos[to] = kv.pos[from];
  for (int c = 0; c < kv.columns; ++c) kv.mass_page(b)[c * S + j] = kv.mass_page(a)[c * S + i];
}

void move(const Pool& kv, const int32_t* src, const int32_t* dst, int64_t lists, int64_t n) {
  for (int64_t i = 0; i < lists * n; ++i)
    if (std::min(src[i], dst[i]) < 0 || std::max(src[i], dst[i]) >= kv.n_pages * kv.S)
      throw std::invalid_argument("src or dst names a slot outside the pool");
#pragma omp parallel for schedule(dynamic) if (lists * n * kv.D > WORTH_WAKING)
  for (int64_t l = 0; l < lists; ++l)
    for (int64_t i = l * n; i < (l + 1) * n; ++i) {
      if (src[i] == dst[i]) continue;
      if (kv.type == Type::float32)
        move_slot<float, 1>(kv, src[i], dst[i]);
      else
        move_slot<uint16_t, 2>(kv, src[i], dst[i]);
    }
}

}  // namespace retain
