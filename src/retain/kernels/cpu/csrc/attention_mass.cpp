// Masses: what the tiles of a head saw is summed, tile by tile in the plan's order, so that it does not depend on who
// computed what.
#include <cmath>
#include <limits>

#include "kernels.h"

namespace retain {

static bool observed(const Attend& a, int b) {
  const Observe& o = a.observe;
  if (!o.weights || a.tables.window_of(b) != std::numeric_limits<int32_t>::max()) return false;
  bool any = o.decay[b] != 1.0f;
  for (int t = a.tables.starts[b]; t < a.tables.starts[b + 1] && !any; ++t) any = o.weights[t] != 0;
  return any;
}

static int64_t slots_of(const Attend& a, const Tile& t) { return int64_t(a.tables.count(t.b, t.g)) * a.kv.S; }

static int64_t weight_bytes(const Attend& a, const Tile& t) {
  return round_up(t.rows() * slots_of(a, t) * bytes(a.kv.type), 64);
}

void Watch::make(const Attend& a, const Plan& plan, int threads) {
  parts_.clear();
  if (!a.observe.weights) return;
  heads_ = a.tables.G;
  std::vector<char> whose(a.tables.B);
  for (int b = 0; b < a.tables.B; ++b) whose[b] = observed(a, b);
  left_.reset(new std::atomic<int>[a.tables.B * heads_]());
  first_.assign(a.tables.B * heads_, -1);
  next_.assign(plan.tiles.size(), -1);
  kept_.assign(plan.tiles.size(), 0);
  int64_t sums = 0, cut = 0;
  own_ = 0;
  for (size_t i = 0; i < plan.tiles.size(); ++i) {
    const Tile& t = plan.tiles[i];
    parts_.push_back(whose[t.b] ? sums : -1);
    if (!whose[t.b]) continue;
    ++left_[t.b * heads_ + t.g];
    next_[i] = first_[t.b * heads_ + t.g];
    first_[t.b * heads_ + t.g] = int(i);
    sums += a.kv.columns * slots_of(a, t);
    const int64_t size = weight_bytes(a, t) + round_up(2 * t.rows() * spans_of(a, t) * 4, 64);
    kept_[i] = cut;
    plan.cut[i] ? cut += size : own_ = std::max(own_, size);
  }
  if (int64_t(sums_.size()) < sums) sums_.resize(sums);
  if (int64_t(memory_.size()) < threads * own_ + cut) memory_.resize(threads * own_ + cut);
  for (int64_t& at : kept_) at += threads * own_;
}

Seen Watch::seen(const Attend& a, const Plan& plan, int tile, int thread) {
  const Tile& t = plan.tiles[tile];
  char* at = memory_.data() + (plan.cut[tile] ? kept_[tile] : thread * own_);
  float* tops = reinterpret_cast<float*>(at + weight_bytes(a, t));
  const int spans = spans_of(a, t);
  return {at, tops, tops + t.rows() * spans, slots_of(a, t), spans};
}

void Watch::finish(const Attend& a, const Plan& plan, int tile, const Seen& seen) {
  const Tile& t = plan.tiles[tile];
  for (int r = 0; r < t.rows(); ++r) {
    float *tops = seen.tops + r * seen.spans, *sums = seen.sums + r * seen.spans;
    float top = NOTHING, sum = 0;
    for (int i = 0; i < seen.spans; ++i) top = std::max(top, tops[i]);
    for (int i = 0; i < seen.spans; ++i) sum += tops[i] == NOTHING ? 0 : sums[i] * std::exp(tops[i] - top);
    const float weight = a.observe.weights[a.tables.starts[t.b] + (t.begin + r) / a.R];
    for (int i = 0; i < seen.spans; ++i) tops[i] = tops[i] == NOTHING ? 0 : weight * std::exp(tops[i] - top) / sum;
  }
  if (next_[first_[t.b * heads_ + t.g]] < 0) return isa().fold(a, t, seen, seen.tops, nullptr);
  isa().fold(a, t, seen, seen.tops, sums_.data() + parts_[tile]);
  if (--left_[t.b * heads_ + t.g] > 0) return;

  const int S = a.kv.S, columns = a.kv.columns;
  const float decay = a.observe.decay[t.b];
  for (int i = 0; i < a.tables.count(t.b, t.g); ++i) {
    float* mass = a.kv.mass_page(a.tables.of(t.b, t.g)[i]);
    for (int s = 0; s < columns * S; ++s) mass[s] *= decay;
    for (int k = first_[t.b * heads_ + t.g]; k >= 0; k = next_[k]) {
      const float* sums = sums_.data() + parts_[k];
      for (int c = 0; c < columns; ++c)
        for (int s = 0; s < S; ++s) mass[c * S + s] += sums[c * seen.slots + int64_t(i) * S + s];
    }
  }
}

}  // namespace retain
