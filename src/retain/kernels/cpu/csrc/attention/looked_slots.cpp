// Chooses the slots that a token looks at, and copies them one behind the other, where the other kernels read them. See
// "Looks" in kernels/api.py.
//
// The choice is of one token and one kv head: it depends on nothing else of the step.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "kernels.h"
#include "slots/resident_slots.h"

namespace retain {

static int pages_per_part(int page_size) {
  constexpr int PART = 1024;  // slots; a part has one partial result
  return std::max(1, PART / page_size);
}

void LookedSlots::begin(const AttentionArgs& args, const QueryTile& tile) {
  page_size_ = args.kv.S;
  num_pages_ = args.tables.num_pages(tile.b, tile.g);
  const int per_part = pages_per_part(page_size_);
  num_parts_ = (num_pages_ + per_part - 1) / per_part;
  const size_t num_slots = size_t(num_pages_) * page_size_;
  if (weights_.size() < args.R * num_slots) weights_.resize(args.R * num_slots);
  priorities_.resize(num_slots);
  for (auto* x : {&maxima_, &sums_, &factors_}) x->resize(num_parts_ * args.R);
}

LookPart LookedSlots::part(int i, int row) {
  const int begin = i * pages_per_part(page_size_), end = std::min(num_pages_, begin + pages_per_part(page_size_));
  const int64_t num_slots = int64_t(num_pages_) * page_size_;
  return {begin, end, weights_.data() + row * num_slots + int64_t(begin) * page_size_, num_slots};
}

// Computes weights for all query heads of the kv head, not only those of the tile. So several tiles of one token, where
// there are many query heads, make the same choice.
void LookedSlots::weigh(const AttentionArgs& args, const QueryTile& tile, int i, float* scratch) {
  const IsaKernels& isa = selected_isa();
  const int first_row = tile.begin / args.R * args.R, end_row = first_row + args.R;
  AttentionArgs by_sketches = args;
  by_sketches.kv = args.kv.sketched_keys();
  for (int row = first_row; row < end_row; row += isa.max_tile_rows) {
    const QueryTile rows = {tile.b, tile.g, row, std::min(row + isa.max_tile_rows, end_row)};
    const int r = row - first_row, j = i * args.R + r;
    isa.look_weights(by_sketches, rows, part(i, r), scratch, &maxima_[j], &sums_[j]);
  }
}

// Computes the priorities of all slots.
void LookedSlots::rank(const AttentionArgs& args, const QueryTile& tile) {
  const int R = args.R;
  for (int r = 0; r < R; ++r) {
    float maximum = NEG_INF, sum = 0;
    for (int i = r; i < num_parts_ * R; i += R) maximum = std::max(maximum, maxima_[i]);
    if (maximum == NEG_INF) maximum = 0;  // it sees no slot
    for (int i = r; i < num_parts_ * R; i += R) sum += sums_[i] * std::exp(maxima_[i] - maximum);
    if (args.params.sink_logits) sum += std::exp(args.params.sink_logits[tile.g * R + r] - maximum);
    for (int i = r; i < num_parts_ * R; i += R) factors_[i] = sum > 0 ? std::exp(maxima_[i] - maximum) / sum : 0;
  }
  for (int i = 0; i < num_parts_; ++i) {
    const LookPart p = part(i, 0);
    selected_isa().look_priorities(args, tile, p, &factors_[i * R], &priorities_[int64_t(p.begin) * page_size_]);
  }
}

// Lists the slots whose priorities are at least `lowest` in `attended_`, and the priorities of those that compete in
// `competing_`.
void LookedSlots::list_slots(float lowest) {
  const int32_t num_slots = int32_t(priorities_.size());
  if (int32_t(attended_.size()) < num_slots) attended_.resize(num_slots);
  num_attended_ = 0;
  for (int32_t i = 0; i < num_slots; ++i) {  // without a branch
    attended_[num_attended_] = i;
    num_attended_ += priorities_[i] >= lowest;
  }
  competing_.clear();
  for (int32_t i = 0; i < num_attended_; ++i)
    if (priorities_[attended_[i]] < ATTENDED) competing_.push_back(priorities_[attended_[i]]);
}

// Estimates from a sample of slots a priority that a few more than n slots reach; 0 where n is most of the slots. A wrong
// estimate costs a second pass over the priorities, and changes no result.
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

void LookedSlots::choose(const AttentionArgs& args, const QueryTile& tile) {
  select_highest(args, tile);
  if (args.kv.resident)
    args.kv.resident->prefetch(args.kv, args.tables.page_table(tile.b, tile.g), attended_.data(), num_attended_);
}

// Selects the slots with the highest priorities, of equal ones the newest.
void LookedSlots::select_highest(const AttentionArgs& args, const QueryTile& tile) {
  const size_t n = tile.num_looked;
  rank(args, tile);
  highest_ = HIDDEN;  // all are attended to
  list_slots(guess_lowest(n));
  if (competing_.size() <= n) list_slots(0);  // the guess was too high
  if (competing_.size() <= n) return;
  std::nth_element(competing_.begin(), competing_.begin() + n, competing_.end(), std::greater<float>());
  highest_ = competing_[n];
  size_t num_above = 0;
  for (size_t i = 0; i < n; ++i) num_above += competing_[i] > highest_;
  if (num_above < n) {  // some of equal priorities are chosen, and some not
    ties_.clear();
    for (int32_t i = 0; i < num_attended_; ++i)
      if (priorities_[attended_[i]] == highest_) ties_.push_back(attended_[i]);
    const int32_t* table = args.tables.page_table(tile.b, tile.g);
    const int S = args.kv.S;
    auto position = [&](int32_t i) { return args.kv.pos[int64_t(table[i / S]) * S + i % S]; };
    std::sort(ties_.begin(), ties_.end(), [&](int32_t a, int32_t b) { return position(a) > position(b); });
    for (size_t i = 0; i < n - num_above; ++i) priorities_[ties_[i]] = ATTENDED;
  }
  const auto is_other = [&](int32_t i) { return priorities_[i] <= highest_; };
  const auto begin = attended_.begin();
  num_attended_ = int32_t(std::remove_if(begin, begin + num_attended_, is_other) - begin);
}

int LookedSlots::num_blocks(const Pool& kv) const {
  const int block = pages_per_block(kv) * kv.S;
  return num_parts_ + (num_attended_ + block - 1) / block;
}

bool LookedSlots::attend(const AttentionArgs& args, const QueryTile& tile, int block, GatheredSlots& gathered,
                         float* scratch, float* partials) {
  const IsaKernels& isa = selected_isa();
  if (block < num_parts_) {
    const int row = tile.begin % args.R;
    const LookPart p = part(block, row);
    isa.sum_means(args, tile, p, &maxima_[block * args.R + row], &priorities_[int64_t(p.begin) * page_size_], highest_,
                  partials);
    return true;
  }
  const int64_t slots = pages_per_block(args.kv) * args.kv.S, first = (block - num_parts_) * slots;
  const int64_t n = std::min<int64_t>(slots, num_attended_ - first);
  return isa.attend_tile(gathered.gather(args, tile, &attended_[first], n), tile, 0, scratch, partials, nullptr);
}

AttentionArgs GatheredSlots::gather(const AttentionArgs& args, const QueryTile& tile, const int32_t* places,
                                    int64_t n) {
  const int64_t S = args.kv.S;
  num_pages_ = int32_t((n + S - 1) / S);
  grow(keys_, num_pages_ * args.kv.key_bytes() + BEHIND_PAGES);
  grow(values_, num_pages_ * args.kv.value_bytes() + BEHIND_PAGES);
  positions_.assign(num_pages_ * S, -1), pages_.resize(num_pages_);
  const int32_t* table = args.tables.page_table(tile.b, tile.g);
  for (int64_t i = 0; i < n; ++i) {
    const int32_t in_table = places[i] / args.kv.S;  // in 32 bits: that is faster
    positions_[i] = args.kv.pos[table[in_table] * S + places[i] - in_table * args.kv.S];
  }
  std::iota(pages_.begin(), pages_.end(), 0);
  AttentionArgs own = args;
  Pool& to = own.kv;
  to.sketches = nullptr, to.resident = nullptr, to.num_pages = num_pages_;
  to.k = keys_.data(), to.v = values_.data(), to.pos = positions_.data();
  to.key_stride = to.key_bytes(), to.value_stride = to.value_bytes();
  if (n % S) {  // holes hold finite numbers
    memset(to.key_page(num_pages_ - 1), 0, to.key_bytes());
    memset(to.value_page(num_pages_ - 1), 0, to.value_bytes());
  }
  if (ResidentSlots* resident = args.kv.resident) {
    grow(records_, n * resident->record_bytes());
    resident->read(args.kv, table, places, n, records_.data());
    selected_isa().gather_records(args.kv, records_.data(), n, to);
  } else {
    selected_isa().gather_slots(args.kv, table, places, n, to);
  }
  own.demoted_kv.k = nullptr;
  PageTables& t = own.tables;
  t.pages = pages_.data(), t.page_row_stride = t.page_head_stride = 0;
  t.page_counts = &num_pages_, t.count_row_stride = t.count_head_stride = 0;
  return own;
}

}  // namespace retain
