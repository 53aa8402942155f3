// Structs that the kernels take: plain addresses, sizes and strides.
//
// Several instruction sets compile this header. If the linker merged a function across them, it could keep the widest
// version, which traps on an older machine. So every function here is forced inline, and this header includes no
// C++ library header that contains code.
//
// Letters: B requests, T fresh tokens, G kv heads, R query heads per kv head, H = G * R, S slots of a page, D numbers of a head:
// `k_dim` of q and k, `v_dim` of v and the output.
//
// Does not depend on: Python, torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/weight_format.h"

namespace retain {

enum class DType : int { float32, bfloat16, int8, k8v4, int4 };

INLINE int element_size(DType t) { return t == DType::float32 ? 4 : t == DType::bfloat16 ? 2 : 1; }

// How many numbers of 4 bits share a scale (kernels/slots/quantized_slots.py).
INLINE int slot_group(int D) {
  const int block = D & -D;
  return block < 32 ? block : 32;
}

constexpr int SKETCH_GROUP = 16;  // slots whose values have one mean

constexpr int MAX_K_DIM = 576, MAX_V_DIM = 512, MAX_PAGE_SIZE = 512;  // scratch memory is sized for these

// Slots that one pass of softmax accumulates; a larger page is a block of its own. A row is always summed slot by slot
// within a block and then block by block over its page table. So its bits do not depend on the other requests, on the
// chunk size or on how threads share the work.
constexpr int ACC_BLOCK = 512;

// Priorities of slots that do not compete: those that are attended to in any case, and those that are not seen.
constexpr float ATTENDED = __builtin_inff(), HIDDEN = -1;

constexpr float NEG_INF = -__builtin_inff();  // the score of a hidden slot, and the maximum of no scores

class ResidentSlots;  // slots/resident_slots.h

// The memory of the KV cache, in pages. A page of K is [D, S], so that one load reads many slots of one dimension.
// A page of V is [S, D]. In bfloat16 pairs are interleaved: K is [D / 2, S, 2], V is [S / 2, D, 2]. In int8 quads are
// interleaved, bytes are 128 too high, and bfloat16 scales [S] follow. With 4 bits K is [D / 8, S, 4] and V is
// [S / 4, D / 2, 4]: bytes of two numbers, 8 too high, the first half of a group in low nibbles; then scales
// [D / group, S]. k8v4 has K of 8 bits and V of 4.
//
// A pool with sketches has its K by slot, [S, D], because looks read single slots; attention to whole pages transposes
// them. With 4 bits K itself is what looks choose by, and stays by dimension.
struct Pool {
  void* k;
  void* v;
  int32_t* pos;  // [P, S]; -1 is a hole
  float* mass;   // [P, mass_columns, S]
  int64_t num_pages;
  int S, k_dim, v_dim, mass_columns;
  DType dtype;
  int64_t key_stride, value_stride;  // bytes between pages
  uint8_t* sketches;  // [P, sketch_stride]: keys in 4 bits, means of values, deviations (kernels/api.py); or null
  int64_t sketch_stride;
  ResidentSlots* resident;  // of slots whose K and V lie in a file; else null

  INLINE bool is_quantized() const { return dtype >= DType::int8; }
  // Elements of a slot's K and V, and its scales.
  INLINE int key_width() const { return dtype == DType::int4 ? k_dim / 2 : k_dim; }
  INLINE int value_width() const { return dtype == DType::int4 || dtype == DType::k8v4 ? v_dim / 2 : v_dim; }
  INLINE int num_key_scales() const { return num_scales(key_width(), k_dim); }
  INLINE int num_value_scales() const { return num_scales(value_width(), v_dim); }
  INLINE int num_scales(int width, int D) const { return !is_quantized() ? 0 : width == D ? 1 : D / slot_group(D); }
  INLINE bool has_keys_by_slot() const { return sketches && dtype != DType::int4; }
  // Words of 4 bytes: of a key, between those of a key, and between the first ones of two keys of a page.
  INLINE int key_words() const { return key_width() * element_size(dtype) / 4; }
  INLINE int key_word_stride() const { return has_keys_by_slot() ? 1 : S; }
  INLINE int key_slot_stride() const { return has_keys_by_slot() ? key_words() : 1; }
  INLINE int64_t key_bytes() const { return int64_t(S) * (key_width() * element_size(dtype) + 2 * num_key_scales()); }
  INLINE int64_t value_bytes() const {
    return int64_t(S) * (value_width() * element_size(dtype) + 2 * num_value_scales());
  }
  // Of a slot's K, V and scales, one behind the other, in whole words.
  INLINE int64_t record_bytes() const { return ((key_bytes() + value_bytes()) / S + 3) / 4 * 4; }
  INLINE void* key_page(int64_t page) const { return static_cast<char*>(k) + page * key_stride; }
  INLINE void* value_page(int64_t page) const { return static_cast<char*>(v) + page * value_stride; }
  // The scales, in bfloat16, of a quantized page.
  INLINE uint16_t* key_scales(int64_t page) const {
    return reinterpret_cast<uint16_t*>(static_cast<char*>(key_page(page)) + int64_t(S) * key_width());
  }
  INLINE uint16_t* value_scales(int64_t page) const {
    return reinterpret_cast<uint16_t*>(static_cast<char*>(value_page(page)) + int64_t(S) * value_width());
  }
  INLINE float* mass_page(int64_t page) const { return mass + page * mass_columns * S; }
  // The keys in 4 bits as a pool without values. A pool in 4 bits has no others.
  INLINE Pool sketched_keys() const {
    Pool p = *this;
    p.dtype = DType::int4;
    if (dtype != DType::int4) p.k = sketches, p.key_stride = sketch_stride;
    return p;
  }
  // In bfloat16: the means [S / SKETCH_GROUP, v_dim] of a page's values, and the deviations [S] behind them.
  INLINE uint16_t* value_means(int64_t page) const {
    const int64_t keys = dtype == DType::int4 ? 0 : sketched_keys().key_bytes();
    return reinterpret_cast<uint16_t*>(sketches + page * sketch_stride + keys);
  }
  INLINE uint16_t* deviations(int64_t page) const { return value_means(page) + S / SKETCH_GROUP * v_dim; }
};

// Fresh rows [T, heads, D] with any stride between tokens and heads; the last dimension is contiguous.
struct StridedRows {
  const void* data;
  int64_t token_stride, head_stride;  // in elements
  DType dtype;
};

// ggml's types of blocks that pack_blocks unpacks, by their numbers in GGUF files.
enum class GgmlType : int {
  Q4_0 = 2, Q4_1, Q5_0 = 6, Q5_1, Q8_0, Q2_K = 10, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39,
  NVFP4
};

// Rows of a matrix in ggml's blocks.
struct BlockRows {
  const uint8_t* data;
  int64_t row_bytes;
  GgmlType type;
};

struct NormParams {
  const float* weight;  // [n]
  const float* bias;    // [n] or null
  float eps;
  bool subtract_mean;  // layer norm; false: RMS norm
};

constexpr int MAX_LOW_RANK = 256;
constexpr int MAX_LOW_RANK_ROWS = 4;  // that an adapter is added to at a time

// Matrices of adapters. Only the first ranks[i] rows of adapter i count.
struct LowRank {
  const char* a;  // [n, rank, in]
  const char* b;  // [n, rank, columns]
  const int32_t* ranks;  // [n]
  int rank, in, columns;
  bool is_bfloat16;  // else float32
};

enum class Activation : int { silu, relu, gelu, gelu_tanh, sigmoid, relu2, swiglu_oai };

// The destination of a product: y (+)= x W^T + bias.
struct OutputView {
  float* y;
  int64_t ldy;  // elements between rows
  const float* bias;
  bool accumulate;
};

struct WriteArgs {
  Pool kv;
  StridedRows k, v;
  const int32_t* slots;  // [G, T]
  int64_t slot_head_stride, slot_token_stride;
  const int32_t* pos;  // [T]
  int T, G;
};

// Slots to copy to slots of another pool, whose dtype may be narrower.
struct RequantizeArgs {
  Pool kv, to;
  const int64_t *src, *dst;  // [n]
  const int32_t* pos;        // [n]: what the copies get
  int64_t n;
};

// The pages of every request that has a row, in one layer; the strides lead to the other layers.
struct PageTables {
  const int32_t* pages;  // [num_rows, G, max_pages]
  int64_t page_row_stride, page_head_stride;
  const int32_t* page_counts;  // [num_rows, G]
  int64_t count_row_stride, count_head_stride;
  const int32_t* windows;  // [num_rows]
  int64_t window_row_stride;
  const int32_t* rows;             // [B]
  const int32_t* query_start_loc;  // [B + 1]
  int B, G;
  int64_t num_rows, max_pages;
  int64_t page_layer_stride, count_layer_stride, window_layer_stride;
  const int32_t* looks;  // [T]: the slots of each head that a fresh token attends to, 0 for all; or null

  INLINE PageTables for_layer(int layer) const {
    PageTables t = *this;
    t.pages += layer * page_layer_stride, t.page_counts += layer * count_layer_stride;
    t.windows += layer * window_layer_stride;
    return t;
  }
  INLINE int num_fresh(int b) const { return query_start_loc[b + 1] - query_start_loc[b]; }
  INLINE int num_pages(int b, int g) const { return page_counts[rows[b] * count_row_stride + g * count_head_stride]; }
  INLINE int32_t window_of(int b) const { return windows[rows[b] * window_row_stride]; }
  INLINE bool has_window(int b) const { return window_of(b) != INT32_MAX; }
  // The first fresh token of request b that looks at few slots, counted from its first one. All behind it do, too.
  INLINE int first_look(int b) const {
    int t = looks && !has_window(b) ? 0 : num_fresh(b);
    while (t < num_fresh(b) && !looks[query_start_loc[b] + t]) ++t;
    return t;
  }
  INLINE const int32_t* page_table(int b, int g) const {
    return pages + rows[b] * page_row_stride + g * page_head_stride;
  }
};

enum class NoiseKind : int { none, gumbel, gaussian, constant };

// How a step updates the mass of slots:
//   mass = decay * mass + sum over fresh queries of weight * softmax((score + noise) / temperature)
// If `weights` is null, the step leaves masses unchanged.
struct AttentionScoring {
  const float* weights;         // [T] or null
  const float* temperature;     // [T]
  const float* decay;           // [B]
  const int32_t* noise;         // [B], a NoiseKind each
  const int32_t* seed;          // [B]
  const int32_t* noise_period;  // [B]: positions of queries that share a draw; 0: all do
  int layer;

  // The number of the draw of noise that a query has at its position; -1: all queries share one.
  INLINE int32_t noise_draw(int b, int32_t position) const {
    return noise_period[b] > 0 ? position / noise_period[b] : -1;
  }
};

// What the attention of a layer needs beside queries and tables. See kernels/attention_params.py for the fields.
struct AttentionParams {
  float scale;
  const float* alibi_slopes;  // [H] or null
  const float* key_offset;    // [G, D] or null
  float softcap;              // 0: none
  const float* sink_logits;   // [H] or null
  int first_head;             // of the kv heads: noise depends on their numbers
};

struct AttentionArgs {
  Pool kv;
  PageTables tables;
  Pool demoted_kv;  // without memory where no request has demoted tokens
  PageTables demoted_tables;
  StridedRows q;         // [T, H, k_dim]
  void* o;               // [T, H, v_dim], contiguous, of q's dtype
  const int32_t* q_pos;  // [T]
  int T, R;
  AttentionParams params;
  AttentionScoring scoring;
  char* transposed_keys = nullptr;  // memory for a block of pages, where the pool has keys by slot

  INLINE bool has_demoted() const { return demoted_kv.k; }
  // The same attention, to demoted tokens alone.
  INLINE AttentionArgs demoted() const {
    AttentionArgs args = *this;
    args.kv = demoted_kv, args.tables = demoted_tables, args.demoted_kv.k = nullptr;
    return args;
  }
};

// Query rows begin .. end - 1 of request b and kv head g. Row i is query head g * R + i % R of fresh token i / R.
struct QueryTile {
  int b, g, begin, end;
  int num_looked = 0;  // slots that its only token chooses; 0: it may have several tokens, which attend to all slots
  int look = -1;       // the index of its look, where threads share it

  INLINE int num_rows() const { return end - begin; }
};
// Pages begin .. end - 1 of a tile's table, and the weights of their slots for rows that are `stride` apart.
struct LookPart {
  int begin, end;
  float* weights;
  int64_t stride;
};
// More rows share the cost of fetching and converting a page; fewer rows keep a tile's scores in cache.
constexpr int MAX_TILE_ROWS = 48;

INLINE float bf16_to_float(uint16_t x) {
  uint32_t u = uint32_t(x) << 16;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
INLINE uint16_t float_to_bf16(float x) {  // round to nearest, ties to even; NaN stays NaN
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return x == x ? uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16) : uint16_t(0x7fc0);
}

// The partial softmax of one row over some slots: D sums of weight * value, then the maximum score and the sum of
// weights. Weights are relative to that maximum.
INLINE int partial_size(int D) { return D + 16; }
constexpr int MAX_PARTIAL = MAX_V_DIM + 16;
template <class Float>
INLINE Float& partial_max(Float* partial, int D) {
  return partial[D];
}
template <class Float>
INLINE Float& partial_sum(Float* partial, int D) {
  return partial[D + 1];
}

// The mass weights of a scored tile in one table, kept until all blocks are computed. A weight is relative to its row's
// maximum in its block. A row without mass in a block has the maximum NEG_INF there and no valid weights.
struct MassBuffers {
  char* weights;         // [rows, slots], float32 for a pool of float32, else bfloat16
  float *maxima, *sums;  // [rows, blocks]: those of this table
  int64_t num_slots;
  int num_blocks;  // between rows: the blocks of both tables
};

// The hash behind noise, a permutation of 32 bits. Every backend uses the same one.
constexpr uint32_t GOLDEN_RATIO = 0x9e3779b9;
template <class Bits>  // uint32_t or a vector of uint32_t
INLINE Bits mix(Bits x) {
  x = (x ^ (x >> 16)) * 0x7feb352d;
  return (x ^ (x >> 15)) * 0x846ca68b;
}
INLINE uint32_t noise_key(int32_t seed, int32_t layer, int32_t head, int32_t draw) {
  uint32_t x = mix(uint32_t(seed) + GOLDEN_RATIO);
  x = mix(x + GOLDEN_RATIO * uint32_t(layer + 1));
  x = mix(x + GOLDEN_RATIO * uint32_t(head + 1));
  return mix(x + GOLDEN_RATIO * uint32_t(draw + 1));
}

INLINE int pages_per_block(const Pool& kv) { return ACC_BLOCK / kv.S > 0 ? ACC_BLOCK / kv.S : 1; }
// A table with a window may begin its first block late, and has one page twice, see PageOrder.
INLINE int num_blocks(const Pool& kv, const PageTables& tables, const QueryTile& tile) {
  const int per_block = pages_per_block(kv);
  const int first = tables.has_window(tile.b) ? per_block - 1 + (tables.num_fresh(tile.b) > 1) : 0;
  return (first + tables.num_pages(tile.b, tile.g) + per_block - 1) / per_block;
}
// The blocks of a head's table, and behind them those of its demoted tokens.
INLINE int num_blocks(const AttentionArgs& args, const QueryTile& tile) {
  const int own = num_blocks(args.kv, args.tables, tile);
  return args.has_demoted() ? own + num_blocks(args.demoted_kv, args.demoted_tables, tile) : own;
}

struct ConvolutionArgs;      // layer_states.h
struct LinearAttentionArgs;

// The kernels of one instruction set (isa_kernels.cpp, slot_kernels.cpp, ggml_blocks.cpp, state_kernels.cpp).
struct IsaKernels {
  const char* name;
  int max_tile_rows;  // of a QueryTile
  // Copies a tile's queries into `scratch`, in the form that products with the pool's pages read.
  void (*gather_queries)(const AttentionArgs&, const QueryTile&, float* scratch);
  // Attends from a tile, whose queries `scratch` has, to one block of its page table. Fills `partials` and returns true
  // if any slot is visible. Also fills this block's part of `mass` if that is not null.
  bool (*attend_tile)(const AttentionArgs&, const QueryTile&, int block, float* scratch, float* partials,
                      const MassBuffers* mass);
  // Merges the partial results of a block into those of the blocks before it.
  void (*merge_partials)(float* total, const float* next, int rows, int D);
  // Computes weights e^(score - maximum) of a tile of one token by keys in 4 bits, for the slots of a part of its
  // table, and the maxima and sums [rows].
  void (*look_weights)(const AttentionArgs&, const QueryTile&, const LookPart&, float* scratch, float* maxima,
                       float* sums);
  // Computes priorities of the slots of a part: the sum of factor * weight over the query heads of the kv head, times
  // the deviation. Of groups that the token does not see whole, visible slots get ATTENDED and hidden ones HIDDEN.
  void (*look_priorities)(const AttentionArgs&, const QueryTile&, const LookPart&, const float* factors,
                          float* priorities);
  // Copies n slots, by their ascending places in a table, one behind the other to a pool whose pages follow each other.
  void (*gather_slots)(const Pool& from, const int32_t* table, const int32_t* places, int64_t n, const Pool& to);
  // The same, from records of slots: see ResidentSlots.
  void (*gather_records)(const Pool& from, const char* records, int64_t n, const Pool& to);
  // Sums the means of values of a part of a table into a partial result of each row: times the sums of its weights,
  // which are relative to `maxima`, over those slots of a group whose priority is 0 to `highest`.
  void (*sum_means)(const AttentionArgs&, const QueryTile&, const LookPart&, const float* maxima,
                    const float* priorities, float highest, float* partials);
  // Sums factor [rows, blocks] * weight over a tile's rows, into sums [columns, slots]. If `sums` is null, updates the
  // masses of the pages instead.
  void (*reduce_mass)(const AttentionArgs&, const QueryTile&, const MassBuffers&, const float* factors, float decay);
  // Writes fresh tokens begin .. end - 1 of kv head g into their slots.
  void (*write)(const WriteArgs&, int g, int begin, int end);
  // Computes the sketch of the values of a slot's group. Nothing where its last slot is a hole: it is not full.
  void (*sketch_values)(const Pool&, int64_t slot);
  // Reads K [n, k_dim] and V [n, v_dim] of n slots.
  void (*read_slots)(const Pool&, const int64_t* slots, int64_t n, float* k, float* v);
  // Copies slots begin .. end - 1 to another pool.
  void (*requantize)(const RequantizeArgs&, int64_t begin, int64_t end);

  // Bytes of one row of activations, prepared for a product with w.
  int64_t (*activation_bytes)(const PackedWeight& w);
  // Converts one row of activations x [in] to the form that products with w read.
  void (*prepare_activations)(const PackedWeight& w, const float* x, char* row);
  // Computes output tiles begin .. end - 1 for `rows` prepared rows.
  void (*packed_gemm)(const PackedWeight& w, int begin, int end, const char* prepared, int rows, const OutputView&);
  // Unpacks row `index` of w, times a factor; `add` adds it to `out`.
  void (*unpack_row)(const PackedWeight& w, int64_t index, float factor, bool add, float* out);
  // Unpacks rows begin .. end - 1 of `rows` into one tile of w, where the first is row `lane`. Returns whether all
  // scales and shifts are finite.
  bool (*pack_blocks)(const BlockRows& rows, int begin, int end, const PackedWeight& w, char* tile, int lane);
  // Normalizes one row of n numbers; `add` adds the result to `out`.
  void (*normalize)(const NormParams&, const float* x, int n, bool add, float* out);
  // Adds to some rows of outputs what an adapter makes of rows of inputs.
  void (*add_low_rank)(const LowRank&, int adapter, const float* const* x, float* const* out, int rows);
  // Applies an activation to n numbers, then multiplies by `gate` if that is not null.
  void (*activate)(Activation, const float* x, const float* gate, int n, float* out);
  // Rotates the n pairs of a head by their angles: cos [n], then sin [n]. Pairs are (2i, 2i + 1) if interleaved, else
  // (i, i + n).
  void (*rope)(float* x, const float* angles, int n, bool interleaved);

  // Convolves a block of channels, and writes its inputs into slots.
  void (*convolve)(const ConvolutionArgs&, int block);
  // Attends with the fresh tokens of request b in value head h, and writes their slots and states. If the tables lack
  // what it needs of earlier tokens, because a load failed, the outputs are 0: the request starts again.
  void (*attend_linearly)(const LinearAttentionArgs&, int b, int h, float* scratch);
};

// Floats between rows of scores. Not a power of 2: all rows would then map to the same cache sets.
constexpr ptrdiff_t SCORE_STRIDE = MAX_PAGE_SIZE + 16;
// Scratch memory of a tile: scores, queries, and what is kept of each query besides.
constexpr int QUERY_OFFSET = MAX_TILE_ROWS * SCORE_STRIDE;
constexpr int QUERY_INFO_OFFSET = QUERY_OFFSET + MAX_TILE_ROWS * MAX_K_DIM;
constexpr int SCRATCH_FLOATS = QUERY_INFO_OFFSET + MAX_TILE_ROWS * (MAX_K_DIM / 8 + 1) + 16;

}  // namespace retain
