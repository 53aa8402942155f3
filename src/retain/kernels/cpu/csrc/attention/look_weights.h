// The weights by which a token that looks at few slots chooses them: those of its attention to copies of keys in 4 bits.
#pragma once

#include "attention/attention_tile.h"

namespace retain::RETAIN_ISA {

// Computes the scores [rows, num_slots] of a tile of one token, slot by slot of its page table. Hidden slots have
// NEG_INF.
INLINE void score_copies(const AttentionArgs& args, const QueryTile& tile, float* scratch, float* scores,
                         int64_t num_slots) {
  const Pool& kv = args.kv;
  const int S = kv.S, rows = tile.num_rows();
  const int n = args.tables.num_pages(tile.b, tile.g), per_block = pages_per_block(kv);
  const int32_t* table = args.tables.page_table(tile.b, tile.g);
  const QueriesOf<Nibbles>& q = queries_in<Nibbles>(scratch);
  for (int first = 0; first < n; first += per_block) {
    const int pages = n - first < per_block ? n - first : per_block;
    VisiblePages<Nibbles> block = {pages, S, kv.k_dim, 0, kv.key_bytes(), 0, {}, {}, {}};
    for (int j = 0; j < pages; ++j) {
      const int next = first + pages + j < n ? first + pages + j : n - 1;
      block.keys[j] = static_cast<const Nibbles*>(kv.key_page(table[first + j]));
      block.next_keys[j] = static_cast<const Nibbles*>(kv.key_page(table[next]));
    }
    Prefetcher<Nibbles> prefetcher(pages, block.next_keys, block.key_bytes, nullptr, 0);
    float* x = scratch;  // [rows, SCORE_STRIDE]
    score_pages(block, q, rows, x, prefetcher);
    if (args.params.softcap) cap_scores(args.params.softcap, rows, pages * S, x);
    for (int j = 0; j < pages; ++j)
      apply_bias_and_mask(args, tile, kv.pos + int64_t(table[first + j]) * S, true, {}, x + j * S);
    for (int r = 0; r < rows; ++r)
      memcpy(scores + r * num_slots + int64_t(first) * S, x + r * SCORE_STRIDE, sizeof(float) * pages * S);
  }
}

INLINE void add_look_weights_impl(const AttentionArgs& args, const QueryTile& tile, float* scratch, float* scores,
                                  float* weights) {
  const int64_t num_slots = int64_t(args.tables.num_pages(tile.b, tile.g)) * args.kv.S;
  gather_queries_impl<uint8_t>(args, tile, scratch);
  score_copies(args, tile, scratch, scores, num_slots);
  for (int r = 0; r < tile.num_rows(); ++r) {
    float* x = scores + r * num_slots;
    F maxima = splat(NEG_INF), total = {};
    for (int64_t s = 0; s < num_slots; s += WIDTH) maxima = max(maxima, load<WIDTH>(x + s));
    const float maximum = reduce_max<WIDTH>(maxima);
    if (maximum == NEG_INF) continue;  // it sees no slot
    for (int64_t s = 0; s < num_slots; s += WIDTH) {
      const F w = exp<float>(load<WIDTH>(x + s) - maximum);
      total += w;
      store<WIDTH>(x + s, w);
    }
    float sum = reduce_sum<WIDTH>(total);
    if (args.params.sink_logits)
      sum += __builtin_expf(args.params.sink_logits[tile.g * args.R + (tile.begin + r) % args.R] - maximum);
    const F factor = splat(1 / sum);
    for (int64_t s = 0; s < num_slots; s += WIDTH)
      store<WIDTH>(weights + s, load<WIDTH>(weights + s) + factor * load<WIDTH>(x + s));
  }
}

}  // namespace retain::RETAIN_ISA
