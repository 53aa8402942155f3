// How attend's work is checked and cut into jobs.
#include <algorithm>
#include <stdexcept>

#include "kernels.h"

namespace retain {

// A request with few fresh tokens has too few tiles to keep the cores busy, so its tiles are cut into stretches of
// spans, whose records are merged afterwards: some stretches for each thread, to share them out evenly, but as long
// as that allows, for only inside a stretch is the next page known and asked for in time. With many fresh tokens a
// job is a whole tile. Either way the numbers are the same (see SPAN).
constexpr int FEW = 64;
constexpr int STRETCHES = 4;

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

void Plan::make(const Attend& a, int threads) {
  const Tables& tables = a.tables;
  tiles.clear(), cut.clear(), records.clear(), jobs.clear(), parts.clear();
  partial_floats = 0, work = 0;
  int64_t few = 0;  // spans of all tiles that may be cut
  for (int b = tables.B - 1; b >= 0; --b)
    for (int end = tables.fresh(b) * a.R; end > 0; end -= TILE_ROWS)  // the last rows see most: they go first
      for (int g = 0; g < tables.G; ++g) {
        tiles.push_back({b, g, std::max(0, end - TILE_ROWS), end});
        const Tile& t = tiles.back();
        if (tables.fresh(b) <= FEW) few += spans_of(a, t);
        work += 2.0 * t.rows() * tables.count(b, g) * a.kv.S * a.kv.D;
      }

  const int stretch = int(std::max<int64_t>(1, few / (STRETCHES * threads)));
  for (int i = 0; i < int(tiles.size()); ++i) {
    const Tile& t = tiles[i];
    const int spans = spans_of(a, t);
    records.push_back(partial_floats);
    cut.push_back(tables.fresh(t.b) <= FEW && spans > stretch);
    if (!cut.back()) {
      jobs.push_back({i, 0, spans});
      continue;
    }
    for (int first = 0; first < spans; first += stretch) parts.push_back({i, first, std::min(spans, first + stretch)});
    partial_floats += int64_t(spans) * t.rows() * record_size(a.kv.D);
  }
  jobs.insert(jobs.end(), parts.begin(), parts.end());
}

}  // namespace retain
