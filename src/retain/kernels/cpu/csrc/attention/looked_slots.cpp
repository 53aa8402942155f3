// Chooses the slots that a token looks at, and copies them one behind the other, where the other kernels read them. See
// "Looks" in kernels/api.py.
//
// The choice is of one token and one kv head: it depends on nothing else of the step.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels.h"

namespace retain {

// All query heads of the kv head are asked, not only those of the tile: with many of them, several tiles of a token make
// the same choice.
void LookedSlots::choose(const AttentionArgs& args, const QueryTile& tile, float* scratch) {
  const IsaKernels& isa = selected_isa();
  const Pool& kv = args.kv;
  const int32_t* table = args.tables.page_table(tile.b, tile.g);
  const int64_t num_slots = int64_t(args.tables.num_pages(tile.b, tile.g)) * kv.S;
  const int first_row = tile.begin / args.R * args.R, end_row = first_row + args.R;
  const int32_t p = args.q_pos[args.tables.query_start_loc[tile.b] + first_row / args.R];
  weights_.assign(num_slots, 0.0f);
  scores_.resize(size_t(args.R) * num_slots);
  maxima_.resize(args.R);
  AttentionArgs by_sketches = args;
  by_sketches.kv = kv.sketched_keys();
  for (int row = first_row; row < end_row; row += isa.max_tile_rows) {
    const QueryTile part = {tile.b, tile.g, row, std::min(row + isa.max_tile_rows, end_row)};
    const int r = row - first_row;
    isa.look_weights(by_sketches, part, scratch, &scores_[r * num_slots], &maxima_[r], weights_.data());
  }

  // Of groups that are seen whole, slots are ranked by the bits of what is not negative, then by their positions.
  ranks_.clear(), attended_.clear();
  auto slot = [&](int64_t i) { return int64_t(table[i / kv.S]) * kv.S + i % kv.S; };
  auto is_visible = [&](int64_t i) { return kv.pos[slot(i)] >= 0 && kv.pos[slot(i)] <= p; };
  auto rank = [&](int64_t i) {
    const float priority = weights_[i] * bf16_to_float(kv.deviations(table[i / kv.S])[i % kv.S]);
    uint32_t bits;
    memcpy(&bits, &priority, sizeof bits);
    return uint64_t(bits) << 32 | uint32_t(kv.pos[slot(i)]);
  };
  auto sees_whole = [&](int64_t begin) {
    int n = 0;
    for (int64_t i = begin; i < begin + SKETCH_GROUP; ++i) n += is_visible(i);
    return n == SKETCH_GROUP;
  };
  std::vector<char> is_whole(num_slots / SKETCH_GROUP);
  for (int64_t j = 0; j < int64_t(is_whole.size()); ++j) {
    is_whole[j] = sees_whole(j * SKETCH_GROUP);
    for (int64_t i = j * SKETCH_GROUP; is_whole[j] && i < (j + 1) * SKETCH_GROUP; ++i) ranks_.push_back(rank(i));
  }
  uint64_t lowest = 0;
  if (ranks_.size() > size_t(tile.look)) {
    const auto nth = ranks_.end() - tile.look;
    std::nth_element(ranks_.begin(), nth, ranks_.end());
    lowest = *nth;
  }
  for (int64_t i = 0; i < num_slots; ++i) {
    const bool whole = is_whole[i / SKETCH_GROUP];
    if (whole ? rank(i) < lowest : false) continue;
    if (is_visible(i)) attended_.push_back(int32_t(i));
    for (int r = 0; r < args.R; ++r) scores_[r * num_slots + i] = 0;  // means stand for the other slots
  }
}

void LookedSlots::copy(const Pool& kv, const int32_t* table) {
  const int64_t n = attended_.size(), S = kv.S;
  num_pages_ = int32_t((n + S - 1) / S);
  keys_.resize(num_pages_ * kv.key_bytes()), values_.resize(num_pages_ * kv.value_bytes());
  positions_.assign(num_pages_ * S, -1), pages_.resize(num_pages_);
  std::iota(pages_.begin(), pages_.end(), 0);
  Pool to = kv;
  to.k = keys_.data(), to.v = values_.data(), to.pos = positions_.data(), to.num_pages = num_pages_;
  to.key_stride = kv.key_bytes(), to.value_stride = kv.value_bytes();
  if (n % S) {  // holes hold finite numbers
    memset(to.key_page(num_pages_ - 1), 0, kv.key_bytes());
    memset(to.value_page(num_pages_ - 1), 0, kv.value_bytes());
  }
  for (int64_t i = 0; i < n; ++i)
    copy_slot(kv, int64_t(table[attended_[i] / S]) * S + attended_[i] % S, to, i);
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

void LookedSlots::attend_to_means(const AttentionArgs& args, const QueryTile& tile, float* partials) const {
  const int64_t num_slots = weights_.size();
  for (int i = tile.begin; i < tile.end; ++i, partials += partial_size(args.kv.v_dim)) {
    const int r = i % args.R;
    selected_isa().sum_means(args, tile, &scores_[r * num_slots], maxima_[r], partials);
  }
}

}  // namespace retain
