// Software prefetching of pages into the L2 cache while others are computed with. L1 allows too few outstanding misses to saturate the
// memory's bandwidth.
#pragma once

#include <cstdint>

#include "isa/simd.h"

namespace retain::RETAIN_ISA {

// The percentage of pages to prefetch during products with other pages. The rest is prefetched during softmax. Products of
// tiles or of integers are short: they would wait for the memory, which would have nothing to do afterwards.
template <class Page>
constexpr int PRODUCTS_PERCENT = HAS_TILES ? 50 : 100;

constexpr int part_of(int lines, int percent) { return (lines * percent + 99) / 100; }

// Prefetches the values of a block, and then the keys of the next one, some cache lines at a time.
template <class Page>
class Prefetcher {
 public:
  INLINE Prefetcher(int n, const Page* const* values, int64_t value_bytes, const Page* const* keys, int64_t key_bytes)
      : n_(n), left_(n), page_(values), keys_(keys), bytes_(value_bytes), key_bytes_(key_bytes) {}

  // Prefetches this type's part of the cache lines that products read meanwhile.
  template <int LINES>
  INLINE void prefetch_during_products() {
    prefetch(part_of(LINES, PRODUCTS_PERCENT<Page>));
  }
  INLINE void prefetch(int lines) {
    if (at_ >= end_ && !next_page()) return;
    for (int i = 0; i < lines; ++i) __builtin_prefetch(at_ + 64 * i, 0, 2);
    at_ += 64 * lines;
  }
  INLINE void prefetch_rest() {
    while (at_ < end_ || next_page()) prefetch(1);
  }
  // Returns how many cache lines of a page each of `steps` steps prefetches, so that the steps prefetch what products
  // leave. `bytes` is the size of the page.
  static INLINE int lines_per_step(int64_t bytes, int steps) {
    return part_of(int(bytes / 64), 100 - PRODUCTS_PERCENT<Page>) / steps + 1;
  }

 private:
  INLINE bool next_page() {
    if (left_ == 0) {
      if (keys_ == nullptr) return false;
      page_ = keys_, keys_ = nullptr, bytes_ = key_bytes_, left_ = n_;
    }
    at_ = reinterpret_cast<const char*>(*page_++), end_ = at_ + bytes_, --left_;
    return true;
  }

  const int n_;                // pages of a list
  int left_;                   // of the current list
  const Page* const* page_;    // the next one
  const Page* const* keys_;    // the second list, until it is the current one
  int64_t bytes_, key_bytes_;  // of each page, of the current list and of keys
  const char *at_ = nullptr, *end_ = nullptr;
};

}  // namespace retain::RETAIN_ISA
