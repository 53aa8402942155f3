// lowest: of many slots a few go, so one pass keeps the lowest so far in a heap, whose top seldom changes.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kernels.h"

namespace retain {

constexpr int64_t SLOTS_WORTH_WAKING = 1 << 13;

// The order of kernels/order.py.
INLINE int64_t rank_of(const Lists& l, float priority, int32_t pos, int64_t place) {
  if (pos < 0) return place - l.S;
  int32_t bits;
  memcpy(&bits, &priority, 4);
  int64_t number = (int64_t(1) << 31) + (bits < 0 ? -int64_t(bits & 0x7FFFFFFF) : bits);
  if (pos < l.sinks || pos > l.after) number = int64_t(1) << 32;
  return (number << 30) + pos;
}

void lowest(const Lists& l, int n, int64_t* places) {
  for (int64_t i = 0; i < l.N; ++i)
    if (l.used[i] < n || l.used[i] > l.S) throw std::invalid_argument("lowest: too few slots, or more than there are");
  if (n == 0) return;
#pragma omp parallel for schedule(dynamic) if (l.N * l.S > SLOTS_WORTH_WAKING)
  for (int64_t i = 0; i < l.N; ++i) {
    const float* priority = l.priority + i * l.S;
    const int32_t* pos = l.pos + i * l.S;
    std::vector<std::pair<int64_t, int64_t>> heap;  // rank and place, the highest on top
    heap.reserve(n + 1);
    for (int64_t s = 0; s < l.used[i]; ++s) {
      const int64_t rank = rank_of(l, priority[s], pos[s], s);
      if (int(heap.size()) == n && rank >= heap.front().first) continue;
      heap.emplace_back(rank, s);
      std::push_heap(heap.begin(), heap.end());
      if (int(heap.size()) <= n) continue;
      std::pop_heap(heap.begin(), heap.end());
      heap.pop_back();
    }
    std::sort_heap(heap.begin(), heap.end());
    for (int j = 0; j < n; ++j) places[i * n + j] = heap[j].second;
  }
}

}  // namespace retain
