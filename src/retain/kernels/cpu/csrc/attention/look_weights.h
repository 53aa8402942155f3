// The weights by which a token that looks at few slots chooses them, and what stands for those that it does not choose.
#pragma once

#include "attention/attention_tile.h"

namespace retain::RETAIN_ISA {

// Computes the scores of a tile of one token, slot by slot of a part of its page table, and the maxima of rows. Hidden
// slots have NEG_INF.
INLINE void score_sketches(const AttentionArgs& args, const QueryTile& tile, const LookPart& part, float* scratch,
                           float* maxima) {
  const Pool& kv = args.kv;
  const int S = kv.S, rows = tile.num_rows();
  const int n = args.tables.num_pages(tile.b, tile.g), per_block = pages_per_block(kv);
  const int32_t* table = args.tables.page_table(tile.b, tile.g);
  const QueriesOf<Nibbles>& q = queries_in<Nibbles>(scratch);
  const int32_t p = args.q_pos[args.tables.query_start_loc[tile.b] + tile.begin / args.R];
  F highest[MAX_TILE_ROWS];
  for (int r = 0; r < rows; ++r) highest[r] = splat(NEG_INF);
  for (int first = part.begin; first < part.end; first += per_block) {
    const int pages = part.end - first < per_block ? part.end - first : per_block;
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
    for (int j = 0; j < pages; ++j) {
      const int32_t* pos = kv.pos + int64_t(table[first + j]) * S;
      const bool has_hidden = page_visibility(pos, S, p, p, INT32_MAX) != Visibility::all;
      if (has_hidden || args.params.alibi_slopes) apply_bias_and_mask(args, tile, pos, has_hidden, {}, x + j * S);
    }
    for (int r = 0; r < rows; ++r) {
      float* to = part.weights + r * part.stride + int64_t(first - part.begin) * S;
      for (int s = 0; s < pages * S; s += WIDTH) {
        const F y = load<WIDTH>(x + r * SCORE_STRIDE + s);
        highest[r] = max(highest[r], y);
        store<WIDTH>(to + s, y);
      }
    }
  }
  for (int r = 0; r < rows; ++r) maxima[r] = reduce_max<WIDTH>(highest[r]);
}

INLINE void look_weights_impl(const AttentionArgs& args, const QueryTile& tile, const LookPart& part, float* scratch,
                              float* maxima, float* sums) {
  const int64_t num_slots = int64_t(part.end - part.begin) * args.kv.S;
  gather_queries_impl<uint8_t>(args, tile, scratch);
  score_sketches(args, tile, part, scratch, maxima);
  for (int r = 0; r < tile.num_rows(); ++r) {
    float* x = part.weights + r * part.stride;
    F total = {};
    const F maximum = splat(maxima[r] == NEG_INF ? 0.0f : maxima[r]);  // if it sees no slot, every weight is 0
    for (int64_t s = 0; s < num_slots; s += WIDTH) {
      const F w = exp<float>(load<WIDTH>(x + s) - maximum);
      total += w;
      store<WIDTH>(x + s, w);
    }
    sums[r] = reduce_sum<WIDTH>(total);
  }
}

INLINE void look_priorities_impl(const AttentionArgs& args, const QueryTile& tile, const LookPart& part,
                                 const float* factors, float* priorities) {
  const Pool& kv = args.kv;
  const int32_t* table = args.tables.page_table(tile.b, tile.g);
  const int32_t p = args.q_pos[args.tables.query_start_loc[tile.b] + tile.begin / args.R];
  const float* weights = part.weights;
  for (int i = part.begin; i < part.end; ++i) {
    const int32_t* pos = kv.pos + int64_t(table[i]) * kv.S;
    const bf16* deviations = reinterpret_cast<const bf16*>(kv.deviations(table[i]));
    for (int first = 0; first < kv.S; first += SKETCH_GROUP, weights += SKETCH_GROUP, priorities += SKETCH_GROUP) {
      I hidden = {};
      for (int s = 0; s < SKETCH_GROUP; s += WIDTH) {
        const I x = load_ints(pos + first + s);
        hidden |= (x < 0) | (x > p);
      }
      const bool is_whole = !reduce_or<WIDTH>(hidden);
      for (int s = 0; s < SKETCH_GROUP; s += WIDTH) {
        F sum = {};
        for (int r = 0; r < args.R; ++r) sum += factors[r] * load<WIDTH>(weights + r * part.stride + s);
        const I x = load_ints(pos + first + s);
        const F other = ((x < 0) | (x > p)) ? splat(HIDDEN) : splat(ATTENDED);
        store<WIDTH>(priorities + s, is_whole ? sum * load<WIDTH>(deviations + first + s) : other);
      }
    }
  }
}

// Asks for the memory of m slots. P slots of V are interleaved.
template <int P>
INLINE void prefetch_slots(const Pool& kv, const int32_t* table, const int32_t* places, int m) {
  const int key_bytes = kv.has_keys_by_slot() ? 4 * kv.key_words() : 0, value_bytes = 4 * kv.value_width();
  for (int j = 0; j < m; ++j) {
    const int64_t page = table[places[j] / kv.S];
    const int offset = places[j] % kv.S;
    const char* k = static_cast<const char*>(kv.key_page(page)) + offset * key_bytes;
    const char* v = static_cast<const char*>(kv.value_page(page)) + offset / P * value_bytes;
    for (int i = 0; i < key_bytes; i += 64) __builtin_prefetch(k + i);
    for (int i = 0; i < value_bytes; i += 64) __builtin_prefetch(v + i);
  }
}

// P numbers of 4 bytes together are interleaved: dimensions of K, and slots of V (see Pool).
template <int P>
INLINE void gather_slots_impl(const Pool& from, const int32_t* table, const int32_t* places, int64_t n, const Pool& to) {
  constexpr int BITS = 32 / P;
  constexpr uint32_t MASK = P == 1 ? ~0u : (1u << BITS % 32) - 1;
  const int S = from.S, key_words = from.key_words(), value_words = from.value_width();
  const uint32_t* keys[MAX_PAGE_SIZE];
  int64_t page[MAX_PAGE_SIZE];
  int offset[MAX_PAGE_SIZE];
  auto num_slots = [&](int64_t first) { return n - first < S ? int(n - first) : S; };
  prefetch_slots<P>(from, table, places, num_slots(0));
  for (int64_t first = 0; first < n; first += S) {
    const int m = num_slots(first);
    if (first + S < n) prefetch_slots<P>(from, table, places + first + S, num_slots(first + S));
    const int64_t to_page = first / S;
    for (int j = 0; j < m; ++j) {
      const int32_t i = places[first + j] / S;
      page[j] = table[i], offset[j] = places[first + j] - i * S;
    }
    uint32_t* to_k = static_cast<uint32_t*>(to.key_page(to_page));
    if (from.has_keys_by_slot()) {
      for (int j = 0; j < m; ++j)
        keys[j] = static_cast<const uint32_t*>(from.key_page(page[j])) + offset[j] * key_words;
      transpose_keys(keys, m, key_words, S, to_k);
    } else {
      for (int j = 0; j < m; ++j) {
        const uint32_t* k = static_cast<const uint32_t*>(from.key_page(page[j])) + offset[j];
        for (int d = 0; d < key_words; ++d) to_k[d * S + j] = k[d * S];
      }
    }
    for (int j = 0; j < m; j += P) {
      uint32_t* to_v = static_cast<uint32_t*>(to.value_page(to_page)) + j / P * value_words;
      const uint32_t* v[P];
      int shift[P];
      uint32_t mask[P];
      for (int i = 0; i < P; ++i) {
        const int slot = j + i < m ? j + i : j;
        v[i] = static_cast<const uint32_t*>(from.value_page(page[slot])) + offset[slot] / P * value_words;
        shift[i] = offset[slot] % P * BITS;
        mask[i] = j + i < m ? MASK : 0;
      }
      for (int d = 0; d < value_words; ++d) {
        uint32_t word = 0;
        for (int i = 0; i < P; ++i) word |= (v[i][d] >> shift[i] & mask[i]) << i * BITS % 32;
        to_v[d] = word;
      }
    }
    if (!from.is_quantized()) continue;
    for (int j = 0; j < m; ++j) {
      for (int g = 0; g < from.num_key_scales(); ++g)
        to.key_scales(to_page)[g * S + j] = from.key_scales(page[j])[g * S + offset[j]];
      for (int g = 0; g < from.num_value_scales(); ++g)
        to.value_scales(to_page)[g * S + j] = from.value_scales(page[j])[g * S + offset[j]];
    }
  }
}

// Values of type T are interleaved in a page, as many as 4 bytes hold, and contiguous in a record (see ResidentSlots).
template <class T>
INLINE void gather_records_impl(const Pool& from, const char* records, int64_t n, const Pool& to) {
  constexpr int P = 4 / sizeof(T);
  const int S = from.S, key_words = from.key_words(), value_words = from.value_width();
  const int64_t record_bytes = from.record_bytes();
  for (int64_t first = 0; first < n; first += S, records += S * record_bytes) {
    const int m = n - first < S ? int(n - first) : S;
    const int64_t page = first / S;
    const uint32_t* keys[MAX_PAGE_SIZE];
    for (int j = 0; j < m; ++j) keys[j] = reinterpret_cast<const uint32_t*>(records + j * record_bytes);
    transpose_keys(keys, m, key_words, S, static_cast<uint32_t*>(to.key_page(page)));
    for (int j = 0; j < m; j += P) {
      uint32_t* to_v = static_cast<uint32_t*>(to.value_page(page)) + j / P * value_words;
      const T* v[P];
      for (int i = 0; i < P; ++i) v[i] = reinterpret_cast<const T*>(keys[j + i < m ? j + i : j] + key_words);
      for (int d = 0; d < value_words; ++d) {
        uint32_t word = 0;
        for (int i = 0; i < P; ++i) word |= j + i < m ? uint32_t(v[i][d]) << i * (32 / P) % 32 : 0;
        to_v[d] = word;
      }
    }
    for (int j = 0; j < m && from.is_quantized(); ++j) {
      const uint16_t* scales = reinterpret_cast<const uint16_t*>(keys[j] + key_words) + value_words / 2;
      for (int g = 0; g < from.num_key_scales(); ++g) to.key_scales(page)[g * S + j] = *scales++;
      for (int g = 0; g < from.num_value_scales(); ++g) to.value_scales(page)[g * S + j] = *scales++;
    }
  }
}

INLINE void sum_means_impl(const AttentionArgs& args, const QueryTile& tile, const LookPart& part, const float* maxima,
                           const float* priorities, float highest, float* partials) {
  const Pool& kv = args.kv;
  const int D = kv.v_dim, groups = kv.S / SKETCH_GROUP, rows = tile.num_rows(), size = partial_size(D);
  const int32_t* table = args.tables.page_table(tile.b, tile.g);
  const float* weights = part.weights;
  float sums[MAX_TILE_ROWS] = {};
  for (int i = 0; i < rows * size; ++i) partials[i] = 0;
  for (int i = part.begin; i < part.end; ++i) {
    const bf16* mean = reinterpret_cast<const bf16*>(kv.value_means(table[i]));
    for (int j = 0; j < groups; ++j, mean += D, weights += SKETCH_GROUP, priorities += SKETCH_GROUP) {
      I is_other[SKETCH_GROUP / WIDTH], any = {};
      for (int s = 0; s < SKETCH_GROUP / WIDTH; ++s) {
        const F x = load<WIDTH>(priorities + s * WIDTH);
        any |= is_other[s] = (x >= 0.0f) & (x <= highest);
      }
      if (!reduce_or<WIDTH>(any)) continue;
      float of_group[MAX_TILE_ROWS];
      for (int r = 0; r < rows; ++r) {
        F total = {};
        for (int s = 0; s < SKETCH_GROUP / WIDTH; ++s)
          total += is_other[s] ? load<WIDTH>(weights + r * part.stride + s * WIDTH) : F{};
        of_group[r] = reduce_sum<WIDTH>(total);
        sums[r] += of_group[r];
      }
      for (int d = 0; d < D; d += WIDTH) {  // the last vector may reach into the maximum and the sum
        const F x = load<WIDTH>(mean + d);
        for (int r = 0; r < rows; ++r)
          store<WIDTH>(partials + r * size + d, load<WIDTH>(partials + r * size + d) + of_group[r] * x);
      }
    }
  }
  for (int r = 0; r < rows; ++r, partials += size)
    partial_max(partials, D) = sums[r] > 0 ? maxima[r] : NEG_INF, partial_sum(partials, D) = sums[r];
}

}  // namespace retain::RETAIN_ISA
