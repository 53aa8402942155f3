// A decoder as a list of operations over buffers of float32 rows, one row for each fresh token. All threads run the
// whole list together. So a step costs one call and one wake-up of the threads, and it allocates nothing.
#pragma once

#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels.h"

namespace retain {

// What the L layers of a KV cache group read and write in a step. Tables are the first layer's.
struct GroupArgs {
  Pool kv;
  PageTables tables;
  Pool demoted_kv;
  PageTables demoted_tables;
  const int32_t* slots;  // [L, G, T]
  int64_t slot_layer_stride, slot_head_stride, slot_token_stride;
  int num_layers;
};

// Rows begin .. end - 1.
struct RowRange {
  int begin, end;
};

// The inputs of a step. Letters as in types.h, and N rows of logits.
struct StepArgs {
  int T, N;
  const int64_t* ids;            // [T]
  const int32_t* pos;            // [T]
  const int64_t* logits_indices;  // [N]; the tokens whose logits are computed
  float* logits;                 // [N, V]
  const std::vector<GroupArgs>& groups;
  const std::vector<std::pair<int, int>>& layers;  // of the model: the group of the cache it reads, its place in there
  AttentionScoring scoring;
  const std::vector<RowRange>& bfloat16_rows;  // ascending: tokens that multiply quantized weights in bfloat16
  const float* hidden_states;                  // [B, E], for an operation that loads them; else null
  int hidden_size;                             // E
  const int32_t* adapters;                     // [T], -1 for none; null where no token has one
};

// The layout of a row of q, k and v: H heads of q and G of k, each of k_dim numbers, and G of v, each of v_dim. Without
// `has_kv` a row is q alone: the layer reads what another layer caches, and changes no mass.
struct QkvLayout {
  int H, G, k_dim, v_dim;
  bool has_kv;
};

// How the rows of a step multiply.
struct RowParts {
  std::vector<RowPart> quantized;  // rows with quantized weights
  std::vector<RowPart> whole;      // rows with others, as one part
  std::vector<RowPart> gathered;   // those that `gather_rows` leaves

  explicit RowParts(const StepArgs&);
};

// Whether an operation has `run`, `run_rows`, `is_idle` or `check`.
template <class T, class = void>
constexpr bool has_run = false;
template <class T>
constexpr bool has_run<T, std::void_t<decltype(&T::run)>> = true;
template <class T, class = void>
constexpr bool has_run_rows = false;
template <class T>
constexpr bool has_run_rows<T, std::void_t<decltype(&T::run_rows)>> = true;

template <class T, class = void>
constexpr bool has_is_idle = false;
template <class T>
constexpr bool has_is_idle<T, std::void_t<decltype(&T::is_idle)>> = true;

// Whether no thread must wait for others between two adjacent operations of this kind.
template <class T, class = void>
constexpr bool needs_no_barrier = false;
template <class T>
constexpr bool needs_no_barrier<T, std::void_t<decltype(T::NEEDS_NO_BARRIER)>> = true;

template <class T, class = void>
constexpr bool has_check = false;
template <class T>
constexpr bool has_check<T, std::void_t<decltype(&T::check)>> = true;

class Program {
 public:
  static constexpr int LOGITS = -1;  // the buffer that belongs to the caller

  // A step as an operation sees it.
  struct StepState {
    const StepArgs& step;
    Program& program;
    const RowParts& parts;
    int rows = step.T;  // N after `gather_rows`
    bool is_gathered = false;

    void gather_rows() {
      rows = step.N;
      is_gathered = true;
    }
    const std::vector<RowPart>& parts_for(const PackedWeight& w) const {
      return is_gathered ? parts.gathered : w.is_quantized() ? parts.quantized : parts.whole;
    }

    float* data(int buffer) const { return buffer == LOGITS ? step.logits : program.buffers_[buffer]; }
    int width(int buffer) const { return buffer == LOGITS ? program.logits_width_ : program.widths_[buffer]; }
  };
  struct RopeTable {
    const float* freqs;
    int n;
    float gain;
    bool interleaved;
    int buffer;
  };

  // Adds a buffer with rows of `width` numbers and returns its number.
  int buffer(int width);
  // Adds a RoPE table that each step computes, and returns its number. The caller keeps `freqs` [n] alive.
  int add_rope_table(const float* freqs, int n, float gain, bool interleaved);

  int width(int buffer) const { return buffer == LOGITS ? logits_width_ : widths_[buffer]; }

  // Appends an operation (operations.cpp). The caller keeps the tensors that it names alive.
  template <class T>
  void push(const T& op);
  // Makes room for the prepared activations of a row; `bfloat16_bytes` only in steps with rows in bfloat16.
  void reserve_prepared(int64_t bytes, int64_t bfloat16_bytes = 0) {
    max_prepared_row_bytes_ = std::max(max_prepared_row_bytes_, bytes);
    max_bfloat16_row_bytes_ = std::max(max_bfloat16_row_bytes_, bfloat16_bytes);
  }
  // Says that rows of logits have at least so many numbers.
  void reserve_logits(int width) { logits_width_ = std::max(logits_width_, width); }

  // Says that the step cannot be computed, as another rank has ended. The first thread calls this.
  void fail() { has_failed_ = true; }

  // Returns memory for the prepared activations of `row` and following ones. It starts on a cache line.
  char* prepared(int row) { return prepared_.data() + row * prepared_row_bytes_; }
  int64_t prepared_row_bytes() const { return prepared_row_bytes_; }
  const RopeTable& rope_table(int table) const { return rope_tables_[table]; }
  AttentionWorkspace& attention() { return attention_; }
  ExpertsWorkspace& experts() { return experts_; }
  StateWorkspace& states() { return states_; }

  // Returns the rows of a buffer after the last `run`. They are valid until the next `run` that begins at 0.
  const float* buffer_address(int buffer) const { return buffers_.at(buffer); }

  // Returns the number of operations.
  int num_ops() const { return int(ops_.size()); }

  // Runs operations begin .. end - 1. A step runs all operations, in one call or several. The call that begins at 0
  // checks the step: it raises std::invalid_argument before it changes anything. Returns false where an
  // operation has failed.
  bool run(const StepArgs&, int begin, int end);

 private:
  struct Operation {
    std::function<void(StepState&, ThreadTeam::Member&)> run;
    std::function<void(const StepState&, int begin, int end)> run_rows;  // empty if rows need others
    std::function<bool(const StepState&)> is_idle;                       // in a step; empty if it never is
    bool joins_next = false;                                             // no barrier behind it
    bool joins_alike = false;
  };

  void reserve(const StepArgs&);
  int end_of_row_ops(const StepState&, int begin, int end, int threads) const;
  void run_row_blocks(const StepState&, int begin, int end, ThreadTeam::Member&);
  void compute_rope_tables(const StepArgs&, ThreadTeam::Member&);
  std::vector<int> widths_;
  std::vector<RopeTable> rope_tables_;
  std::vector<Operation> ops_;
  std::vector<std::function<void(const StepState&)>> checks_;
  int64_t max_prepared_row_bytes_ = 0, max_bfloat16_row_bytes_ = 0;
  int logits_width_ = 0;

  bool has_failed_ = false;
  int reserved_rows_ = 0;
  int64_t prepared_row_bytes_ = 0;
  AlignedVector<float> memory_;
  std::vector<float*> buffers_;
  AlignedVector<char> prepared_;
  AttentionWorkspace attention_;
  ExpertsWorkspace experts_;
  StateWorkspace states_;
};

template <class T>
void Program::push(const T& op) {
  Operation to;
  if constexpr (has_run_rows<T>)
    to.run_rows = [op](const StepState& state, int begin, int end) { op.run_rows(state, begin, end); };
  if constexpr (has_run<T>) {
    to.run = [op](StepState& state, ThreadTeam::Member& member) { op.run(state, member); };
  } else {
    to.run = [op](StepState& state, ThreadTeam::Member& member) {
      member.parallel_for(state.rows, [&](int begin, int end) { op.run_rows(state, begin, end); });
    };
  }
  if constexpr (has_is_idle<T>) to.is_idle = [op](const StepState& state) { return op.is_idle(state); };
  to.joins_alike = needs_no_barrier<T>;
  if (to.joins_alike && !ops_.empty()) ops_.back().joins_next = ops_.back().joins_alike;
  if constexpr (has_check<T>) checks_.push_back([op](const StepState& state) { op.check(state); });
  ops_.push_back(std::move(to));
}

}  // namespace retain
