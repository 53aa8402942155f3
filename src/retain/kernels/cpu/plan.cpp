// How attend's work is checked and cut into jobs.
#include <algorithm>
#include <stdexcept>

#include "kernels.h"

namespace retain {

// A request with few fresh tokens has too few tiles to keep the cores busy, so its jobs are single spans, whose
// records are merged afterwards. With many, a job is a whole tile. Either way the numbers are the same (see SPAN).
constexpr int FEW = 64;
constexpr double WORTH_WAKING = 1 << 17;  // multiply-adds

// What would make a kernel read where it must not. Serial, for it costs far less than the work.
void check(const Attend& a) {
  const Tables& t = a.tables;
  int32_t end = t.starts[0];
  if (end < 0) throw std::invalid_argument("tables.starts must not be negative");
  for (int b = 0; b < t.B; ++b) {
    if (t.starts[b + 1] < end) throw std::invalid_argument("tables.starts must not descend");
    end = t.starts[b + 1];
    if (t.rows[b] < 0 || t.rows[b] >= t.N) throw std::invalid_argument("tables.rows names a row outside tables.pages");
    for (int g = 0; g < t.G; ++g) {
      const int32_t n = t.count(b, g);
      if (n < 0 || n > t.n) throw std::invalid_argument("tables.counts exceeds the width of tables.pages");
      uint32_t highest = 0;
      for (int i = 0; i < n; ++i) highest = std::max(highest, uint32_t(t.of(b, g)[i]));
      if (highest >= a.kv.n_pages && n > 0) throw std::invalid_argument("tables.pages names a page outside the pool");
    }
  }
  if (end > a.T) throw std::invalid_argument("tables.starts ends beyond the fresh tokens");
}

Plan plan(const Attend& a) {
  Plan p;
  std::vector<Job> parts;
  double work = 0;
  for (int b = a.tables.B - 1; b >= 0; --b) {
    for (int end = a.tables.fresh(b) * a.R; end > 0; end -= TILE_ROWS) {  // the last rows see most: they go first
      for (int g = 0; g < a.tables.G; ++g) {
        const Tile t{b, g, std::max(0, end - TILE_ROWS), end};
        const int tile = int(p.tiles.size()), spans = spans_of(a, t);
        p.tiles.push_back(t);
        p.records.push_back(p.partial_floats);
        work += 2.0 * t.rows() * a.tables.count(b, g) * a.kv.S * a.kv.D;
        if (a.tables.fresh(b) > FEW || spans < 2) {
          p.jobs.push_back({tile, -1});
          continue;
        }
        for (int i = 0; i < spans; ++i) parts.push_back({tile, i});
        p.partial_floats += int64_t(spans) * t.rows() * record_size(a.kv.D);
      }
    }
  }
  p.jobs.insert(p.jobs.end(), parts.begin(), parts.end());
  p.alone = work < WORTH_WAKING;
  return p;
}

}  // namespace retain
