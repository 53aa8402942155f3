// Chooses the slots that a token looks at, and copies them one behind the other, where the other kernels read them. See
// "Looks" in kernels/api.py.
//
// The choice is of one token and one kv head: it depends on nothing else of the step.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels.h"

namespace retain {

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Computes the priorities of all slots of a table. All query heads of the kv head are asked, not only those of the tile:
// with many of them, several tiles of a token make the same choice.
void LookedSlots::rank(const AttentionArgs& args, const QueryTile& tile, float* scratch) {
  const IsaKernels& isa = selected_isa();
  const int64_t num_slots = int64_t(args.tables.num_pages(tile.b, tile.g)) * args.kv.S;
  const int first_row = tile.begin / args.R * args.R, end_row = first_row + args.R;
  priorities_.assign(num_slots, 0.0f);
  if (scores_.size() < size_t(args.R) * num_slots) scores_.resize(size_t(args.R) * num_slots);
  maxima_.resize(args.R);
  AttentionArgs by_sketches = args;
  by_sketches.kv = args.kv.sketched_keys();
  for (int row = first_row; row < end_row; row += isa.max_tile_rows) {
    const QueryTile part = {tile.b, tile.g, row, std::min(row + isa.max_tile_rows, end_row)};
    const int r = row - first_row;
    isa.look_weights(by_sketches, part, scratch, &scores_[r * num_slots], &maxima_[r], priorities_.data());
  }
  isa.look_priorities(args, tile, priorities_.data());
}

// Returns the bits of the n-th largest priority of those that compete. The bits of positive numbers ascend as they do: a
// histogram of the first ones leaves few to be sorted.
uint32_t LookedSlots::find_nth(size_t n) {
  constexpr int SHIFT = 20;
  counts_.assign(1 << (31 - SHIFT), 0);
  for (float x : priorities_)
    if (x >= 0 && x < ATTENDED) ++counts_[bits_of(x) >> SHIFT];
  uint32_t bin = counts_.size() - 1;
  for (; counts_[bin] < int32_t(n); --bin) n -= counts_[bin];
  ranks_.clear();
  for (float x : priorities_)
    if (x >= 0 && x < ATTENDED && bits_of(x) >> SHIFT == bin) ranks_.push_back(bits_of(x));
  const auto nth = ranks_.end() - n;
  std::nth_element(ranks_.begin(), nth, ranks_.end());
  return *nth;
}

// Chooses the slots with the highest priorities, of equal ones the newest.
void LookedSlots::choose(const AttentionArgs& args, const QueryTile& tile) {
  const int64_t num_slots = priorities_.size();
  size_t num_competing = 0;
  for (float x : priorities_) num_competing += x >= 0 && x < ATTENDED;
  highest_ = HIDDEN;  // all are attended to
  if (num_competing > size_t(tile.num_looked)) {
    const uint32_t lowest = find_nth(tile.num_looked);
    memcpy(&highest_, &lowest, sizeof lowest);
    size_t num_above = 0;
    ties_.clear();
    for (int64_t i = 0; i < num_slots; ++i) {
      num_above += priorities_[i] > highest_ && priorities_[i] < ATTENDED;
      if (priorities_[i] == highest_) ties_.push_back(int32_t(i));
    }
    const int32_t* table = args.tables.page_table(tile.b, tile.g);
    const int S = args.kv.S;
    auto position = [&](int32_t i) { return args.kv.pos[int64_t(table[i / S]) * S + i % S]; };
    std::sort(ties_.begin(), ties_.end(), [&](int32_t a, int32_t b) { return position(a) > position(b); });
    for (size_t i = 0; i < tile.num_looked - num_above; ++i) priorities_[ties_[i]] = ATTENDED;
  }
  attended_.clear();
  for (int64_t i = 0; i < num_slots; ++i)
    if (priorities_[i] > highest_) attended_.push_back(int32_t(i));
}

AttentionArgs LookedSlots::gather(const AttentionArgs& args, const QueryTile& tile, float* scratch) {
  rank(args, tile, scratch);
  choose(args, tile);
  const int64_t n = attended_.size(), S = args.kv.S;
  num_pages_ = int32_t((n + S - 1) / S);
  constexpr int BEHIND = 64;  // kernels may load what lies behind the last page
  keys_.resize(num_pages_ * args.kv.key_bytes() + BEHIND), values_.resize(num_pages_ * args.kv.value_bytes() + BEHIND);
  positions_.assign(num_pages_ * S, -1), pages_.resize(num_pages_);
  std::iota(pages_.begin(), pages_.end(), 0);
  AttentionArgs own = args;
  Pool& to = own.kv;
  to.k = keys_.data(), to.v = values_.data(), to.pos = positions_.data(), to.num_pages = num_pages_;
  to.key_stride = to.key_bytes(), to.value_stride = to.value_bytes();
  if (n % S) {  // holes hold finite numbers
    memset(to.key_page(num_pages_ - 1), 0, to.key_bytes());
    memset(to.value_page(num_pages_ - 1), 0, to.value_bytes());
  }
  selected_isa().gather_slots(args.kv, args.tables.page_table(tile.b, tile.g), attended_.data(), n, to);
  own.demoted_kv.k = nullptr;
  PageTables& t = own.tables;
  t.pages = pages_.data(), t.page_row_stride = t.page_head_stride = 0;
  t.page_counts = &num_pages_, t.count_row_stride = t.count_head_stride = 0;
  return own;
}

void LookedSlots::attend_to_means(const AttentionArgs& args, const QueryTile& tile, float* partials) const {
  const int64_t num_slots = priorities_.size();
  for (int i = tile.begin; i < tile.end; ++i, partials += partial_size(args.kv.v_dim)) {
    const int r = i % args.R;
    selected_isa().sum_means(args, tile, &scores_[r * num_slots], maxima_[r], priorities_.data(), highest_, partials);
  }
}

}  // namespace retain
