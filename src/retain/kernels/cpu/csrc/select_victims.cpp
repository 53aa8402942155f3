// Selects the slots that are evicted first. Few of many slots are selected, so one pass keeps the best candidates in a
// heap whose top rarely changes.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace retain {

constexpr int64_t MIN_PARALLEL_SLOTS = 1 << 13;

// The order of the reference backend, lowest first: holes by index, then slots by priority, then protected slots; equal
// ones by position.
INLINE int64_t eviction_key(const VictimLists& lists, float priority, int32_t pos, int64_t slot) {
  if (pos < 0) return slot - lists.S;
  int32_t bits;
  memcpy(&bits, &priority, 4);
  int64_t number = (int64_t(1) << 31) + (bits < 0 ? -int64_t(bits & 0x7FFFFFFF) : bits);
  if (pos < lists.first_evictable || pos > lists.last_evictable) number = int64_t(1) << 32;
  return (number << 30) + pos;
}

void select_victims(const VictimLists& lists, int n, int64_t* victims) {
  for (int64_t i = 0; i < lists.N; ++i) {
    if (lists.lengths[i] < n)
      throw std::invalid_argument("select_victims: a list of " + std::to_string(lists.lengths[i]) +
                                  " slots has too few to select " + std::to_string(n));
    if (lists.lengths[i] > lists.S)
      throw std::invalid_argument("select_victims: lengths exceeds the number of slots of a list");
  }
  if (n == 0) return;
#pragma omp parallel for schedule(dynamic) if (lists.N * lists.S > MIN_PARALLEL_SLOTS)
  for (int64_t i = 0; i < lists.N; ++i) {
    const float* priority = lists.priority + i * lists.S;
    const int32_t* pos = lists.pos + i * lists.S;
    std::vector<std::pair<int64_t, int64_t>> heap;  // key and slot, the highest key on top
    heap.reserve(n + 1);
    for (int64_t s = 0; s < lists.lengths[i]; ++s) {
      const int64_t key = eviction_key(lists, priority[s], pos[s], s);
      if (int(heap.size()) == n && key >= heap.front().first) continue;
      heap.emplace_back(key, s);
      std::push_heap(heap.begin(), heap.end());
      if (int(heap.size()) <= n) continue;
      std::pop_heap(heap.begin(), heap.end());
      heap.pop_back();
    }
    std::sort_heap(heap.begin(), heap.end());
    for (int j = 0; j < n; ++j) victims[i * n + j] = heap[j].second;
  }
}

}  // namespace retain
