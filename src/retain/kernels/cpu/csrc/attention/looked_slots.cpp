// Chooses the slots that a token looks at, and copies them one behind the other, where the other kernels read them. See
// "Looks" in kernels/api.py.
//
// The choice is of one token and one kv head: it depends on nothing else of the step.
#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include "kernels.h"

namespace retain {

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

// Lists the slots whose priorities are at least `lowest` in `attended_`, and the priorities of those that compete in
// `competing_`.
void LookedSlots::list_slots(float lowest) {
  const int32_t num_slots = int32_t(priorities_.size());
  attended_.resize(num_slots);
  int32_t n = 0;
  for (int32_t i = 0; i < num_slots; ++i) {  // without a branch
    attended_[n] = i;
    n += priorities_[i] >= lowest;
  }
  attended_.resize(n);
  competing_.clear();
  for (int32_t i : attended_)
    if (priorities_[i] < ATTENDED) competing_.push_back(priorities_[i]);
}

// Returns a priority that more than n slots reach in all likelihood, and few more: one of a sample. 0 for few slots.
float LookedSlots::guess_lowest(size_t n) {
  constexpr size_t STEP = 17;  // of a group of 16 each place has its turn
  sample_.clear();
  for (size_t i = 0; i < priorities_.size(); i += STEP)
    if (priorities_[i] >= 0 && priorities_[i] < ATTENDED) sample_.push_back(priorities_[i]);
  const size_t rank = n / STEP + n / STEP / 4 + 4;
  if (rank >= sample_.size()) return 0;
  std::nth_element(sample_.begin(), sample_.begin() + rank, sample_.end(), std::greater<float>());
  return sample_[rank];
}

// Chooses the slots with the highest priorities, of equal ones the newest.
void LookedSlots::choose(const AttentionArgs& args, const QueryTile& tile) {
  const size_t n = tile.num_looked;
  highest_ = HIDDEN;  // all are attended to
  list_slots(guess_lowest(n));
  if (competing_.size() < n) list_slots(0);
  if (competing_.size() <= n) return;
  std::nth_element(competing_.begin(), competing_.begin() + n, competing_.end(), std::greater<float>());
  highest_ = competing_[n];
  size_t num_above = 0;
  for (size_t i = 0; i < n; ++i) num_above += competing_[i] > highest_;
  if (num_above < n) {  // some of equal priorities are chosen, and some not
    ties_.clear();
    for (int32_t i : attended_)
      if (priorities_[i] == highest_) ties_.push_back(i);
    const int32_t* table = args.tables.page_table(tile.b, tile.g);
    const int S = args.kv.S;
    auto position = [&](int32_t i) { return args.kv.pos[int64_t(table[i / S]) * S + i % S]; };
    std::sort(ties_.begin(), ties_.end(), [&](int32_t a, int32_t b) { return position(a) > position(b); });
    for (size_t i = 0; i < n - num_above; ++i) priorities_[ties_[i]] = ATTENDED;
  }
  const auto is_other = [&](int32_t i) { return priorities_[i] <= highest_; };
  attended_.erase(std::remove_if(attended_.begin(), attended_.end(), is_other), attended_.end());
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
  to.sketches = nullptr, to.k = keys_.data(), to.v = values_.data(), to.pos = positions_.data(), to.num_pages = num_pages_;
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
