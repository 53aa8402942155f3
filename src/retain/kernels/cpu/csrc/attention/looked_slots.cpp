// Chooses the slots that a token looks at, and copies them one behind the other, where the other kernels read them.
//
// The choice is of one token and one kv head: it depends on nothing else of the step.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels.h"

namespace retain {

// Chooses the slots with the largest weights; of equal ones the newest. All query heads of the kv head are asked, not
// only those of the tile: with many of them, several tiles of a token make the same choice.
void LookedSlots::choose(const AttentionArgs& args, const QueryTile& tile, float* scratch) {
  const IsaKernels& isa = selected_isa();
  const Pool& kv = args.kv;
  const int32_t* table = args.tables.page_table(tile.b, tile.g);
  const int64_t num_slots = int64_t(args.tables.num_pages(tile.b, tile.g)) * kv.S;
  const int first_row = tile.begin / args.R * args.R, end_row = first_row + args.R;
  weights_.assign(num_slots, 0.0f);
  scores_.resize(size_t(isa.max_tile_rows) * num_slots);
  AttentionArgs by_copies = args;
  by_copies.kv = kv.copies();
  for (int row = first_row; row < end_row; row += isa.max_tile_rows) {
    const QueryTile part = {tile.b, tile.g, row, std::min(row + isa.max_tile_rows, end_row)};
    isa.add_look_weights(by_copies, part, scratch, scores_.data(), weights_.data());
  }
  const int32_t p = args.q_pos[args.tables.query_start_loc[tile.b] + first_row / args.R];
  auto rank = [&](int64_t i) {  // weights are not negative: their bits ascend as they do
    uint32_t bits;
    memcpy(&bits, &weights_[i], sizeof bits);
    return uint64_t(bits) << 32 | uint32_t(kv.pos[int64_t(table[i / kv.S]) * kv.S + i % kv.S]);
  };
  auto is_visible = [&](int64_t i) {
    const int32_t pos = kv.pos[int64_t(table[i / kv.S]) * kv.S + i % kv.S];
    return pos >= 0 && pos <= p;
  };
  ranks_.clear();
  for (int64_t i = 0; i < num_slots; ++i)
    if (is_visible(i)) ranks_.push_back(rank(i));
  uint64_t lowest = 0;
  if (ranks_.size() > size_t(tile.look)) {
    auto nth = ranks_.end() - tile.look;
    std::nth_element(ranks_.begin(), nth, ranks_.end());
    lowest = *nth;
  }
  chosen_.clear();
  for (int64_t i = 0; i < num_slots; ++i)
    if (is_visible(i) && rank(i) >= lowest) chosen_.push_back(int32_t(i));
}

void LookedSlots::copy(const Pool& kv, const int32_t* table) {
  const int64_t n = chosen_.size(), S = kv.S;
  num_pages_ = int32_t((n + S - 1) / S);
  keys_.resize(num_pages_ * kv.key_bytes()), values_.resize(num_pages_ * kv.value_bytes());
  positions_.assign(num_pages_ * S, -1), pages_.resize(num_pages_);
  std::iota(pages_.begin(), pages_.end(), 0);
  Pool to = kv;
  to.k = keys_.data(), to.v = values_.data(), to.pos = positions_.data(), to.num_pages = num_pages_;
  to.key_stride = kv.key_bytes(), to.value_stride = kv.value_bytes(), to.key_copies = nullptr;
  if (n % S) {  // holes hold finite numbers
    memset(to.key_page(num_pages_ - 1), 0, kv.key_bytes());
    memset(to.value_page(num_pages_ - 1), 0, kv.value_bytes());
  }
  for (int64_t i = 0; i < n; ++i)
    copy_slot(kv, int64_t(table[chosen_[i] / S]) * S + chosen_[i] % S, to, i);
}

AttentionArgs LookedSlots::gather(const AttentionArgs& args, const QueryTile& tile, float* scratch) {
  choose(args, tile, scratch);
  copy(args.kv, args.tables.page_table(tile.b, tile.g));
  AttentionArgs own = args;
  own.kv.k = keys_.data(), own.kv.v = values_.data(), own.kv.pos = positions_.data();
  own.kv.num_pages = num_pages_, own.kv.key_stride = args.kv.key_bytes(), own.kv.value_stride = args.kv.value_bytes();
  own.demoted_kv.k = nullptr;
  PageTables& t = own.tables;
  t.pages = pages_.data(), t.page_row_stride = t.page_head_stride = 0;
  t.page_counts = &num_pages_, t.count_row_stride = t.count_head_stride = 0;
  return own;
}

}  // namespace retain
