// Selects the slots that are evicted first, from lists of numbers or in the tables of rows. Few of many slots are
// selected, so one pass keeps the best candidates in a heap whose top rarely changes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace retain {

constexpr int64_t MIN_PARALLEL_SLOTS = 1 << 13;

// The positions that may be evicted; those before or after them go last.
struct Evictable {
  int32_t first, last;
};

// The order of the reference backend, lowest first: holes by place, then slots by priority, then protected slots; equal
// ones by position.
INLINE int64_t eviction_key(float priority, int32_t pos, int64_t place, Evictable evictable) {
  if (pos < 0) return place - (int64_t(1) << 30);
  int32_t bits;
  memcpy(&bits, &priority, 4);
  int64_t number = (int64_t(1) << 31) + (bits < 0 ? -int64_t(bits & 0x7FFFFFFF) : bits);
  if (pos < evictable.first || pos > evictable.last) number = int64_t(1) << 32;
  return (number << 30) + pos;
}

// The slots with the n lowest keys of those offered.
class LowestKeys {
 public:
  explicit LowestKeys(int n) : n_(n) { heap_.reserve(n + 1); }

  INLINE void offer(int64_t key, int64_t slot) {
    if (key < limit_) insert(key, slot);
  }

  // Pairs of a key and a slot, the lowest key first. Ends the search.
  const std::vector<std::pair<int64_t, int64_t>>& sorted() {
    std::sort_heap(heap_.begin(), heap_.end());
    return heap_;
  }

 private:
  void insert(int64_t key, int64_t slot) {
    heap_.emplace_back(key, slot);
    std::push_heap(heap_.begin(), heap_.end());
    if (int(heap_.size()) > n_) {
      std::pop_heap(heap_.begin(), heap_.end());
      heap_.pop_back();
    }
    if (int(heap_.size()) == n_) limit_ = heap_.front().first;
  }

  int n_;
  int64_t limit_ = INT64_MAX;  // the highest of n keys
  std::vector<std::pair<int64_t, int64_t>> heap_;  // the highest key on top
};

static void check_length(const char* function, int64_t length, int n) {
  if (length < n)
    throw std::invalid_argument(std::string(function) + ": a list of " + std::to_string(length) +
                                " slots has too few to select " + std::to_string(n));
}

void select_victims(const VictimLists& lists, int n, int64_t* victims) {
  for (int64_t i = 0; i < lists.N; ++i) {
    check_length("select_victims", lists.lengths[i], n);
    if (lists.lengths[i] > lists.S)
      throw std::invalid_argument("select_victims: lengths exceeds the number of slots of a list");
  }
  if (n == 0) return;
  const Evictable evictable{lists.first_evictable, lists.last_evictable};
#pragma omp parallel for schedule(dynamic) if (lists.N * lists.S > MIN_PARALLEL_SLOTS)
  for (int64_t i = 0; i < lists.N; ++i) {
    const float* priority = lists.priority + i * lists.S;
    const int32_t* pos = lists.pos + i * lists.S;
    LowestKeys lowest(n);
    for (int64_t s = 0; s < lists.lengths[i]; ++s) lowest.offer(eviction_key(priority[s], pos[s], s, evictable), s);
    int64_t* out = victims + i * n;
    for (const auto& [key, slot] : lowest.sorted()) *out++ = slot;
  }
}

// Returns the slots of all lists. Throws std::invalid_argument if one names a page, row or layer that does not exist.
static int64_t check_lists(const Pool& kv, const EvictionLists& lists, int n) {
  auto in_range = [](const int32_t* numbers, int64_t count, int64_t end) {
    return std::all_of(numbers, numbers + count, [&](int32_t x) { return x >= 0 && x < end; });
  };
  if (!in_range(lists.rows, lists.B, lists.num_rows) || !in_range(lists.layers, lists.M, lists.L))
    throw std::invalid_argument("punch: rows or layers are not those of the tables");
  int64_t num_slots = 0;
  for (int64_t i = 0; i < lists.B * lists.M * lists.G; ++i) {
    const int64_t used = lists.slots_used[i], num_pages = (used + kv.S - 1) / kv.S;
    check_length("punch", used, n);
    if (num_pages > lists.max_pages) throw std::invalid_argument("punch: slots_used exceeds the tables");
    if (!in_range(lists.table(i), num_pages, kv.num_pages))
      throw std::invalid_argument("punch: a page is outside the pool");
    num_slots += used;
  }
  return num_slots;
}

void punch(const Pool& kv, const EvictionLists& lists, const HoleTables& holes, int n) {
  const int64_t S = kv.S, C = kv.mass_columns, num_slots = check_lists(kv, lists, n);
  if (n == 0) return;
#pragma omp parallel for schedule(dynamic) if (num_slots > MIN_PARALLEL_SLOTS)
  for (int64_t i = 0; i < lists.B * lists.M * lists.G; ++i) {
    const int64_t b = i / (lists.M * lists.G), m = i / lists.G % lists.M, g = i % lists.G;
    const int64_t used = lists.slots_used[i];
    const int32_t* table = lists.table(i);
    const Evictable evictable{lists.evictable[2 * b], lists.evictable[2 * b + 1]};
    const bool by_mass = lists.by_mass[b];  // by position, the oldest of equal priorities goes first
    LowestKeys lowest(n);
    for (int64_t first = 0; first < used; first += S) {
      const int64_t page = table[first / S], end = std::min(S, used - first);
      const int32_t* pos = kv.pos + page * S;
      const float* mass = kv.mass + page * C * S;
      for (int64_t s = 0; s < end; ++s) {
        float priority = by_mass ? mass[s] : 0.0f;
        for (int64_t c = 1; by_mass && c < C; ++c) priority += mass[c * S + s];
        if (std::isnan(priority)) priority = std::numeric_limits<float>::quiet_NaN();  // its sign is the processor's
        lowest.offer(eviction_key(priority, pos[s], first + s, evictable), page * S + s);
      }
    }
    int32_t* to = holes.slots + lists.rows[b] * holes.row_stride + lists.layers[m] * holes.layer_stride +
                  g * holes.head_stride;
    for (const auto& [key, slot] : lowest.sorted()) {
      *to++ = int32_t(slot);
      kv.pos[slot] = -1;
    }
  }
}

}  // namespace retain
