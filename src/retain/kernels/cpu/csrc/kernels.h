// Functions that the files of this backend share: checks, plans, threads. types.h has their structs.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "attention/layer_states.h"
#include "thread_team.h"
#include "types.h"

namespace retain {

// Allocates memory that starts on a cache line. Rows of tiles and vectors of AVX-512 are loads of 64 bytes, which take
// longer where they span two lines: products with tiles took 8 to 15 % more time.
template <class T>
struct CacheLineAllocator {
  using value_type = T;
  static constexpr std::align_val_t LINE{64};

  CacheLineAllocator() = default;
  template <class U>
  CacheLineAllocator(const CacheLineAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), LINE)); }
  void deallocate(T* p, size_t) { ::operator delete(p, LINE); }
  friend bool operator==(const CacheLineAllocator&, const CacheLineAllocator&) { return true; }
  friend bool operator!=(const CacheLineAllocator&, const CacheLineAllocator&) { return false; }
};
template <class T>
using AlignedVector = std::vector<T, CacheLineAllocator<T>>;

const std::vector<IsaKernels>& supported_isas();  // fastest first
const IsaKernels& selected_isa();
void select_isa(const std::string& name);
// The largest activation_bytes: memory that is enough whichever set is selected later.
int64_t max_activation_bytes(const PackedWeight&);

// Blocks begin .. end - 1 of a tile, computed by one thread. Of a tile that looks: share `begin` of `end` equal ones,
// because its blocks are not known before its slots are chosen.
struct AttentionJob {
  int tile;
  int begin, end;
};

// The jobs of one attention call (attention_plan.cpp). Callers reuse a plan to keep its memory.
struct AttentionPlan {
  std::vector<QueryTile> tiles;
  std::vector<char> is_split;            // for each tile: whether several jobs share its blocks
  std::vector<int64_t> partial_offsets;  // for each split tile: where its blocks' partial results begin
  std::vector<AttentionJob> jobs, split_jobs;
  std::vector<int> shared_looks;  // tiles whose looks threads share
  int64_t num_partial_floats = 0;
  double multiply_adds = 0;

  void build(const AttentionArgs&, int threads);
};
void check(const AttentionArgs&);
void check(const WriteArgs&);

using TableMasses = std::array<MassBuffers, 2>;  // of a head's table, and of its demoted tokens

// Whether the queries of request b change masses.
bool is_request_scored(const AttentionArgs&, int b);

// Adds the mass weights of scored tiles to the masses of their slots (attention_mass.cpp).
class MassAccumulator {
 public:
  void build(const AttentionArgs&, const AttentionPlan&, int threads);
  bool is_scored(int tile) const { return !is_scored_.empty() && is_scored_[tile]; }
  // The buffers of a tile: memory of the thread, or memory of the tile if it is split.
  TableMasses buffers(const AttentionArgs&, const AttentionPlan&, int tile, int thread);
  // Takes a tile whose blocks are all computed. If all tiles of its head before it are added, adds it and those that
  // wait for it; else the thread that adds the tile before it will do so.
  void finish_tile(const AttentionArgs&, const AttentionPlan&, int tile, int thread);

 private:
  struct Head {
    int first_tile, next_tile;  // of the plan; the next one to be added. The tiles of a head are num_heads_ apart
    bool is_busy;               // a thread adds tiles
  };
  void take_spare_buffer(int thread);

  int num_heads_ = 0;
  std::vector<char> is_scored_;                         // for each tile
  std::vector<Head> heads_;                             // for each request and head
  std::vector<int64_t> buffer_offsets_;                 // for each split tile: where its buffers begin
  std::vector<char*> finished_;                         // for each tile: its buffers, while it waits to be added
  std::vector<char*> thread_buffers_, spare_buffers_;   // each for one tile
  AlignedVector<char> memory_;                          // of all buffers
  std::mutex mutex_;                                    // of heads_, finished_ and spare_buffers_
};

constexpr int BEHIND_PAGES = 64;  // bytes that kernels may load behind the last page
template <class T>
void grow(AlignedVector<T>& x, size_t size) {
  if (x.size() < size) x.resize(size);
}

// Slots that were copied one behind the other: pages for attention (looked_slots.cpp). A thread reuses them.
class GatheredSlots {
 public:
  // Copies n slots, by their places in a tile's table. Returns the arguments for attention to the copies.
  AttentionArgs gather(const AttentionArgs&, const QueryTile&, const int32_t* places, int64_t n);

 private:
  AlignedVector<char> keys_, values_, records_;
  std::vector<int32_t> positions_, pages_;
  int32_t num_pages_;
};

// Sparse attention of a tile of one token: the slots that it chooses, and means of values for the others
// (looked_slots.cpp). Call `begin`, then `weigh` for each part of its page table, then `choose`. Its first blocks are the
// means of each part, the others the slots that it chose.
class LookedSlots {
 public:
  // Sizes memory for the tile's page table.
  void begin(const AttentionArgs&, const QueryTile&);
  int num_parts() const { return num_parts_; }
  // Computes the weights of a part by keys in 4 bits.
  void weigh(const AttentionArgs&, const QueryTile&, int part, float* scratch);
  // Chooses the slots with the highest priorities, once all parts have weights, and asks for those that lie in a file.
  void choose(const AttentionArgs&, const QueryTile&);
  int num_blocks(const Pool&) const;
  // Computes partial results of a block, given queries in `scratch`. Returns whether a slot is visible.
  bool attend(const AttentionArgs&, const QueryTile&, int block, GatheredSlots&, float* scratch, float* partials);

 private:
  LookPart part(int i, int row);
  void rank(const AttentionArgs&, const QueryTile&);
  void select_highest(const AttentionArgs&, const QueryTile&);
  void list_slots(float lowest);
  float guess_lowest(size_t n);

  int num_pages_, num_parts_, page_size_;
  AlignedVector<float> weights_, priorities_;  // [R, slots], [slots]
  std::vector<float> maxima_, sums_, factors_;  // [parts, R]
  float highest_;                              // of slots that are not chosen; HIDDEN where all are
  std::vector<float> sample_, competing_;      // priorities
  std::vector<int32_t> ties_;                  // places in the table
  std::vector<int32_t> attended_;              // ascending places; while `choose` runs, its candidates
  int32_t num_attended_;
};

// Memory of the `attend` kernel. Callers reuse it between calls.
struct AttentionWorkspace {
  AttentionPlan plan;
  MassAccumulator mass;
  std::vector<LookedSlots> looks;                    // those that threads share, or else one of each thread
  std::vector<GatheredSlots> gathered;               // of each thread
  std::vector<AlignedVector<char>> transposed_keys;  // of each thread
  AlignedVector<float> partials;
  std::unique_ptr<std::atomic<int>[]> blocks_done;  // for each tile
  size_t max_tiles = 0;

  void build(const AttentionArgs&, int threads);
};
// Every member of a team calls this, after one thread has built the workspace and all have passed a barrier.
void attend(const AttentionArgs&, AttentionWorkspace&, ThreadTeam::Member&);

void attend(const AttentionArgs&);
void write(const WriteArgs&);
// Computes the sketches of the values of groups that fresh token t was written into.
void sketch_token(const WriteArgs&, int t);
// Reads K [n, k_dim] and V [n, v_dim] of n slots.
void read_slots(const Pool&, const int64_t* slots, int64_t n, float* k, float* v);
void requantize(const RequantizeArgs&);
void copy(const Pool&, const int64_t* src, const int64_t* dst, int64_t n);
void move(const Pool&, const int32_t* src, const int32_t* dst, int64_t lists, int64_t n);

// N lists of S slots, of which the first `lengths` are candidates for eviction (select_victims.cpp).
struct VictimLists {
  const float* priority;   // [N, S]
  const int32_t* pos;      // [N, S]
  const int32_t* lengths;  // [N]
  int64_t N, S;
  int32_t first_evictable, last_evictable;  // positions before or after these are evicted last
};
// Writes the n slots of each list that are evicted first, in order, to victims [N, n].
void select_victims(const VictimLists&, int n, int64_t* victims);

// The slots that B rows evict from in M layers and G kv heads: the first `slots_used` of their tables.
struct EvictionLists {
  const int32_t* pages;  // [num_rows, L, G, max_pages]
  int64_t row_stride, layer_stride, head_stride;
  int64_t num_rows, L, max_pages;
  const int32_t* rows;        // [B]
  const int32_t* layers;      // [M]
  const int32_t* slots_used;  // [B, M, G]
  const int32_t* evictable;   // [B, 2], the first and the last position
  const int32_t* by_mass;     // [B], 1 where the priority is the mass, 0 where it is the position
  int64_t B, M, G;

  const int32_t* table(int64_t i) const {  // of list i
    return pages + rows[i / (M * G)] * row_stride + layers[i / G % M] * layer_stride + i % G * head_stride;
  }
};
// The holes of all rows, layers and kv heads.
struct HoleTables {
  int32_t* slots;  // [num_rows, L, G, i]
  int64_t row_stride, layer_stride, head_stride;
};
// Turns the n slots of each list that are evicted first into holes, and writes their numbers to the first n holes.
void punch(const Pool&, const EvictionLists&, const HoleTables&, int n);

// A weight matrix before packing (pack.cpp). `numbers` is [out, in] in float32 or bfloat16, or in 8 bits if quantized.
// Quantized matrices have float16 scales of their groups, [out, n], and some have shifts too.
struct UnpackedWeight {
  const void* numbers;
  const uint16_t *scale, *shift;
};
void pack(const UnpackedWeight&, const PackedWeight& packed);
// Unpacks all rows of `blocks` into rows first .. first + rows - 1 of `packed`. Returns whether all scales are finite.
bool pack_blocks(const BlockRows& blocks, int rows, int first, const PackedWeight& packed);
// Sums factors[i] * x[i]^2 over each row x [in] of `blocks`.
void row_energies(const BlockRows& blocks, int rows, int in, const float* factors, float* energies);

// Rows begin .. end - 1 of a product, which are multiplied alike.
struct RowPart {
  Products products;
  int begin, end;
};

// Computes y (+)= x W^T + bias for rows of x [rows, in]. `prepared` starts on a cache line and has room for
// activation_bytes of each row, with the number of rows rounded up to MAX_PADDED_ROWS: kernels may read what lies
// behind the last one.
void packed_gemm(const PackedWeight&, const float* x, int64_t ldx, int rows, char* prepared, const OutputView&);
// The same for rows in parts, divided by outputs. The activations of part p are prepared at p.begin * prepared_stride.
// Every member of a team calls this, and the result is complete after the next barrier.
void packed_gemm(const PackedWeight&, const float* x, int64_t ldx, const std::vector<RowPart>& parts, char* prepared,
                 int64_t prepared_stride, const OutputView&, ThreadTeam::Member&);

// `width` numbers of each of H heads in a row: those of head h begin at first + h * stride.
struct HeadColumns {
  int H, width, stride, first;

  int64_t begin(int h) const { return first + int64_t(h) * stride; }
};

// Multiplies the source columns of each head with its own matrix, and writes the target columns: rows h * target.width
// and following of the weight, which are whole tiles. As packed_gemm; `prepared` has room for H rows of each token.
void packed_gemm_by_head(const PackedWeight&, const float* x, int64_t ldx, int rows, char* prepared, float* y,
                         int64_t ldy, const HeadColumns& source, const HeadColumns& target, ThreadTeam::Member&);

// How a token chooses experts (kernels/experts.py).
struct Router {
  int num_experts, top_k;
  bool is_sigmoid, normalize;
  float scale;
  const float* bias;  // [num_experts] or null
  int num_groups, top_groups;
  int group_best;  // experts that a group counts as much as: 1 or 2
  const float* expert_scale;  // [num_experts] or null
  float sum_epsilon;
};

// Experts of a layer, one below the other: those of numbers first .. first + count - 1. Others add nothing.
struct Experts {
  Router router;
  int first, count;
  PackedWeight gate_up, down;               // [n 2 I, E], [n E, I]
  const float *gate_up_bias, *down_bias;    // [n 2 I], [n E]; or null
  Activation act;
  bool is_gated;  // without gates it is I in place of 2 I

  int width() const { return down.in; }
  int inner_size() const { return is_gated ? 2 * width() : width(); }
  // Bytes of prepared activations for each token: one row for itself and each of its experts, and spare ones.
  int64_t prepared_bytes() const {
    const int k = router.top_k;
    return std::max((k + 2) * max_activation_bytes(gate_up), (k + 1) * max_activation_bytes(down));
  }
};

// T tokens, and memory for them. A choice is one of the k experts of a token.
struct ExpertsArgs {
  const float *x, *scores;  // [T, E], [T, n]
  int T;
  float *hidden, *y;  // [T k, 2 I], [T k, E]: a row for each choice
  OutputView out;
};

// What the experts of a step share between threads; reused by all layers.
struct ExpertsWorkspace {
  std::vector<int> experts;           // [T, k]: the choices of each token
  std::vector<float> weights;         // [T, k]
  std::vector<int> rows;              // [T, k]: the place of each choice when they are sorted by expert, or -1
  std::vector<int> active, row_begin;  // the experts that were chosen; the first row of each, and the end
};

// Every member of a team calls this, and the result is complete after the next barrier. `prepared` has room for
// prepared_bytes() of each token, with the number of tokens rounded up to MAX_PADDED_ROWS.
void mix_experts(const Experts&, const ExpertsArgs&, ExpertsWorkspace&, char* prepared, ThreadTeam::Member&);

// Memory of operations over states, reused by all layers.
struct StateWorkspace {
  std::vector<int32_t> found;    // see ConvolutionArgs
  AlignedVector<float> scratch;  // of each thread
};
void check(const ConvolutionArgs&, int T);
void check(const LinearAttentionArgs&, int T);
// Every member of a team calls these, and the result is complete after the next barrier. `found` is set here.
void convolve(ConvolutionArgs, StateWorkspace&, ThreadTeam::Member&);
void attend_linearly(const LinearAttentionArgs&, StateWorkspace&, ThreadTeam::Member&);

}  // namespace retain
