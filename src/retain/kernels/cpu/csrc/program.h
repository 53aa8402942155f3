// A decoder as a list of operations over buffers of float32 rows, one row for each fresh token. All threads run the
// whole list together. So a step costs one call and one wake-up of the threads, and it allocates nothing.
#pragma once

#include <functional>
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
};

// The layout of a row of q, k and v: H heads of q and G of k, each of k_dim numbers, and G of v, each of v_dim. Without
// `has_kv` a row is q alone: the layer reads what another layer caches, and changes no mass.
struct QkvLayout {
  int H, G, k_dim, v_dim;
  bool has_kv;
};

class Program {
 public:
  static constexpr int LOGITS = -1;  // the buffer that belongs to the caller

  // Adds a buffer with rows of `width` numbers and returns its number.
  int buffer(int width);
  // Adds a RoPE table that each step computes, and returns its number. The caller keeps `freqs` [n] alive.
  int rope_table(const float* freqs, int n, float gain, bool interleaved);

  // Each of these appends an operation. The caller keeps weights, biases, factors and the tensors of AttentionParams alive.
  void embedding(int out, const PackedWeight&, bool by_position, int offset, float factor, bool add);
  void norm(int in, int out, const NormParams&, int n, int heads, bool add, int first);
  // `first` is the column of `out` at which the outputs begin.
  void linear(int in, int out, const PackedWeight&, const float* bias, bool add, int first);
  void head_linear(int in, int out, const PackedWeight&, const HeadColumns& source, const HeadColumns& target);
  void copy_columns(int in, int out, const HeadColumns& source, const HeadColumns& target);
  void activation(int in, int out, Activation, int n, bool gated);
  // Rows of `hidden` have k 2 I numbers, those of `y` k E: see ExpertsArgs.
  void experts(int in, int scores, int out, int hidden, int y, const Experts&, bool add);
  void clip(int buffer, float limit);
  void softcap(int buffer, float limit);
  void multiply(int buffer, int by, int first);
  void scale(int buffer, const float* factors, int n);
  void scale_by_position(int buffer, int n, float beta, int period);
  void rope(int buffer, int table, int heads, int D);
  void attend(int qkv, int out, int layer, QkvLayout, const AttentionParams&);
  void convolve(int in, int out, int layer, const Convolution&);
  void linear_attention(int qkv, int gates, int out, int tokens_layer, int states_layer, const LinearAttention&);
  void gather_rows(int in, int out);  // keeps the rows of logits_indices; later operations run on these only

  // Returns the rows of a buffer after the last `run`. They are valid until the next `run` that begins at 0.
  const float* buffer_address(int buffer) const { return buffers_.at(buffer); }

  // Returns the number of operations.
  int num_ops() const { return int(ops_.size()); }

  // Runs operations begin .. end - 1. A step runs all operations, in one call or several. The call that begins at 0
  // checks the step: it raises std::invalid_argument before it changes anything.
  void run(const StepArgs&, int begin, int end);

 private:
  struct StepState;
  struct EmbeddingOp;
  struct NormOp;
  struct LinearOp;
  struct HeadLinearOp;
  struct CopyColumnsOp;
  struct ActivationOp;
  struct ExpertsOp;
  struct ClipOp;
  struct SoftcapOp;
  struct MultiplyOp;
  struct ScaleOp;
  struct ScaleByPositionOp;
  struct RopeOp;
  struct AttentionOp;
  struct ConvolutionOp;
  struct LinearAttentionOp;
  struct GatherRowsOp;
  struct RopeTable {
    const float* freqs;
    int n;
    float gain;
    bool interleaved;
    int buffer;
  };

  struct Operation {
    std::function<void(StepState&, ThreadTeam::Member&)> run;
    std::function<void(const StepState&, int begin, int end)> run_rows;  // empty if rows need others
  };

  void reserve(const StepArgs&);
  // Returns memory for the prepared activations of `row` and following ones. It starts on a cache line.
  char* prepared(int row) { return prepared_.data() + row * prepared_row_bytes_; }
  int end_of_row_ops(const StepState&, int begin, int end, int threads) const;
  void run_row_blocks(const StepState&, int begin, int end, ThreadTeam::Member&);
  void compute_rope_tables(const StepArgs&, ThreadTeam::Member&);
  template <class T>
  void push(const T& op);
  template <class T>
  void push_checked(const T& op);

  std::vector<int> widths_;
  std::vector<RopeTable> rope_tables_;
  std::vector<Operation> ops_;
  std::vector<std::function<void(const StepState&)>> checks_;
  int64_t max_prepared_row_bytes_ = 0, max_bfloat16_row_bytes_ = 0;
  int logits_width_ = 0;

  int reserved_rows_ = 0;
  int64_t prepared_row_bytes_ = 0;
  AlignedVector<float> memory_;
  std::vector<float*> buffers_;
  AlignedVector<char> prepared_;
  AttentionWorkspace attention_;
  ExpertsWorkspace experts_;
  StateWorkspace states_;
};

}  // namespace retain
