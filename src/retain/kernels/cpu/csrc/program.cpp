// The operations of a program, and the loop that runs them.
#include "program.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace retain {

// Bounds of the rows that a thread takes through several operations at a time.
constexpr int MIN_BLOCK_ROWS = 32, MAX_BLOCK_ROWS = 128;

// How the rows of a step multiply.
struct RowParts {
  std::vector<RowPart> quantized;  // rows with quantized weights
  std::vector<RowPart> whole;      // rows with others, as one part
  std::vector<RowPart> gathered;   // those that `gather_rows` leaves

  explicit RowParts(const StepArgs& step)
      : whole{{Products::integers, 0, step.T}}, gathered{{Products::integers, 0, step.N}} {
    int begin = 0;
    for (const RowRange& range : step.bfloat16_rows) {
      if (begin < range.begin) quantized.push_back({Products::integers, begin, range.begin});
      if (range.begin < range.end) quantized.push_back({Products::bfloat16, range.begin, range.end});
      begin = range.end;
    }
    if (begin < step.T || quantized.empty()) quantized.push_back({Products::integers, begin, step.T});
  }
};

struct Program::StepState {
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
  int width(int buffer) const { return program.widths_[buffer]; }
  int row_width(int buffer) const { return buffer == LOGITS ? program.logits_width_ : width(buffer); }
};

// Whether an operation has `run`, or `run_rows`.
template <class T, class = void>
constexpr bool has_run = false;
template <class T>
constexpr bool has_run<T, std::void_t<decltype(&T::run)>> = true;
template <class T, class = void>
constexpr bool has_run_rows = false;
template <class T>
constexpr bool has_run_rows<T, std::void_t<decltype(&T::run_rows)>> = true;

// An operation that computes each row from the same row alone has `run_rows(state, begin, end)`, for one thread. One
// that divides few rows otherwise, or needs other rows, has `run(state, member)`: all threads call it, and a barrier
// follows.
// An operation may have `check(state)`, which throws if the step is invalid.
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
  ops_.push_back(std::move(to));
}
template <class T>
void Program::push_checked(const T& op) {
  checks_.push_back([op](const StepState& state) { op.check(state); });
  push(op);
}

struct Program::EmbeddingOp {
  int out;
  PackedWeight table;
  bool by_position;
  int offset;
  float factor;
  bool add;

  void run_rows(const StepState& state, int begin, int end) const {
    const int width = state.width(out);
    for (int t = begin; t < end; ++t)
      selected_isa().unpack_row(table, index(state, t), factor, add, state.data(out) + int64_t(t) * width);
  }

  int64_t index(const StepState& state, int t) const {
    return by_position ? state.step.pos[t] + offset : state.step.ids[t];
  }

  void check(const StepState& state) const {
    for (int t = 0; t < state.step.T; ++t)
      if (const int64_t i = index(state, t); i < 0 || i >= table.out)
        throw std::invalid_argument(by_position ? "positions names a row outside the position embedding"
                                                : "input_ids names a row outside the embedding");
  }
};

struct Program::NormOp {
  int in, out;
  NormParams norm;
  int n, heads;  // a row is `heads` times n numbers; each head has its own weights
  bool add;
  int first;  // the number of a row at which the heads begin

  void run_rows(const StepState& state, int begin, int end) const {
    for (int t = begin; t < end; ++t)
      for (int h = 0; h < heads; ++h) {
        const float* x = state.data(in) + int64_t(t) * state.width(in) + first + h * n;
        float* y = state.data(out) + int64_t(t) * state.width(out) + first + h * n;
        selected_isa().normalize({norm.weight + h * n, norm.bias, norm.eps, norm.subtract_mean}, x, n, add, y);
      }
  }
};

struct Program::LinearOp {
  int in, out;
  PackedWeight weight;
  const float* bias;
  bool add;
  int first;

  void run(StepState& state, ThreadTeam::Member& member) const {
    packed_gemm(weight, state.data(in), state.width(in), state.parts_for(weight), state.program.prepared(0),
                state.program.prepared_row_bytes_, outputs(state, 0), member);
  }

  void run_rows(const StepState& state, int begin, int end) const {
    for (const RowPart& p : state.parts_for(weight)) {
      const int first = std::max(begin, p.begin), last = std::min(end, p.end);
      if (first >= last) continue;
      packed_gemm(weight.with(p.products), state.data(in) + int64_t(first) * state.width(in), state.width(in),
                  last - first, state.program.prepared(first), outputs(state, first));
    }
  }

  OutputView outputs(const StepState& state, int row) const {
    const int64_t width = state.row_width(out);
    return {state.data(out) + row * width + first, width, bias, add};
  }
};

struct Program::HeadLinearOp {
  int in, out;
  PackedWeight weight;
  HeadColumns source, target;

  void run(StepState& state, ThreadTeam::Member& member) const {
    packed_gemm_by_head(weight, state.data(in), state.width(in), state.rows, state.program.prepared(0), state.data(out),
                        state.width(out), source, target, member);
  }
};

struct Program::CopyColumnsOp {
  int in, out;
  HeadColumns source, target;

  void run_rows(const StepState& state, int begin, int end) const {
    for (int t = begin; t < end; ++t)
      for (int h = 0; h < source.H; ++h)
        memcpy(state.data(out) + int64_t(t) * state.width(out) + target.begin(h),
               state.data(in) + int64_t(t) * state.width(in) + source.begin(h), size_t(source.width) * 4);
  }
};

struct Program::ActivationOp {
  int in, out;
  Activation kind;
  int n;
  bool gated;  // activation(first half of a row) * second half

  void run_rows(const StepState& state, int begin, int end) const {
    for (int t = begin; t < end; ++t) {
      const float* x = state.data(in) + int64_t(t) * state.width(in);
      selected_isa().activate(kind, x, gated ? x + n : nullptr, n,
                              state.data(out) + int64_t(t) * state.width(out));
    }
  }
};

struct Program::ExpertsOp {
  int in, scores, out, hidden, y;
  Experts experts;
  bool add;

  void run(StepState& state, ThreadTeam::Member& member) const {
    Program& p = state.program;
    const OutputView to = {state.data(out), state.width(out), nullptr, add};
    mix_experts(experts, {state.data(in), state.data(scores), state.rows, state.data(hidden), state.data(y), to},
                p.experts_, p.prepared(0), member);
  }
};

struct Program::ClipOp {
  int buffer;
  float limit;

  void run_rows(const StepState& state, int begin, int end) const {
    const int64_t n = state.width(buffer);
    for (int64_t i = begin * n; i < end * n; ++i) {
      float& x = state.data(buffer)[i];
      x = std::min(std::max(x, -limit), limit);
    }
  }
};

struct Program::SoftcapOp {
  int buffer;
  float limit;

  void run_rows(const StepState& state, int begin, int end) const {
    const int n = state.row_width(buffer);
    for (int t = begin; t < end; ++t) {
      float* x = state.data(buffer) + int64_t(t) * n;
      for (int i = 0; i < n; ++i) x[i] *= 2 / limit;  // tanh(y) = 2 sigmoid(2 y) - 1
      selected_isa().activate(Activation::sigmoid, x, nullptr, n, x);
      for (int i = 0; i < n; ++i) x[i] = limit * (2 * x[i] - 1);
    }
  }
};

struct Program::MultiplyOp {
  int buffer, by, first;

  void run_rows(const StepState& state, int begin, int end) const {
    const int n = state.width(buffer);
    for (int t = begin; t < end; ++t) {
      float* x = state.data(buffer) + int64_t(t) * n;
      const float* factors = state.data(by) + int64_t(t) * state.width(by) + first;
      for (int i = 0; i < n; ++i) x[i] *= factors[i];
    }
  }
};

struct Program::ScaleOp {
  int buffer;
  const float* factors;
  int n;

  void run_rows(const StepState& state, int begin, int end) const {
    for (int t = begin; t < end; ++t) {
      float* x = state.data(buffer) + int64_t(t) * state.width(buffer);
      for (int i = 0; i < n; ++i) x[i] *= factors[i];
    }
  }
};

struct Program::ScaleByPositionOp {
  int buffer, n;
  float beta;
  int period;

  void run_rows(const StepState& state, int begin, int end) const {
    for (int t = begin; t < end; ++t) {
      float* x = state.data(buffer) + int64_t(t) * state.width(buffer);
      const float factor = 1 + beta * std::log1p(float(state.step.pos[t] / period));
      for (int i = 0; i < n; ++i) x[i] *= factor;
    }
  }
};

struct Program::RopeOp {
  int buffer, table, heads, D;

  void run_rows(const StepState& state, int begin, int end) const {
    const RopeTable& r = state.program.rope_tables_[table];
    for (int t = begin; t < end; ++t)
      for (int h = 0; h < heads; ++h)
        selected_isa().rope(state.data(buffer) + int64_t(t) * state.width(buffer) + h * D,
                            state.data(r.buffer) + int64_t(t) * 2 * r.n, r.n, r.interleaved);
  }
};

static void check_layer(const StepArgs& s, int layer) {
  if (layer >= int(s.layers.size()))
    throw std::invalid_argument("the step has tables of fewer layers than the program");
  const auto [group, i] = s.layers[layer];
  if (group < 0 || group >= int(s.groups.size()) || i < 0 || i >= s.groups[group].num_layers)
    throw std::invalid_argument("the step has no tables of a layer");
}

struct Program::AttentionOp {
  int qkv, out, layer;
  QkvLayout layout;
  AttentionParams params;

  AttentionArgs attention_args(const StepState& state) const {
    const StepArgs& s = state.step;
    const auto [group, i] = s.layers[layer];
    const GroupArgs& g = s.groups[group];
    const StridedRows q = {state.data(qkv), state.width(qkv), layout.k_dim, DType::float32};
    AttentionScoring scoring = layout.has_kv ? s.scoring : AttentionScoring();
    scoring.layer = layer;
    return {g.kv, g.tables.for_layer(i), g.demoted_kv, g.demoted_tables.for_layer(i), q, state.data(out), s.pos, s.T,
            layout.H / layout.G, params, scoring};
  }

  WriteArgs write_args(const StepState& state) const {
    const StepArgs& s = state.step;
    const auto [group, i] = s.layers[layer];
    const GroupArgs& g = s.groups[group];
    const int64_t width = state.width(qkv);
    const float* k = state.data(qkv) + layout.H * layout.k_dim;
    const StridedRows keys = {k, width, layout.k_dim, DType::float32};
    const StridedRows values = {k + layout.G * layout.k_dim, width, layout.v_dim, DType::float32};
    return {g.kv, keys, values, g.slots + i * g.slot_layer_stride, g.slot_head_stride, g.slot_token_stride, s.pos, s.T,
            layout.G};
  }

  void run(StepState& state, ThreadTeam::Member& member) const {
    const AttentionArgs args = attention_args(state);
    if (member.id == 0) state.program.attention_.build(args, member.size);
    if (layout.has_kv) {
      const WriteArgs write = write_args(state);
      member.parallel_for(write.T, [&](int begin, int end) {
        if (params.key_offset) subtract_offset(state, begin, end);
        for (int g = 0; g < layout.G; ++g) selected_isa().write(write, g, begin, end);
      });
    }
    member.barrier();
    retain::attend(args, state.program.attention_, member);
  }

  void subtract_offset(const StepState& state, int begin, int end) const {
    for (int t = begin; t < end; ++t) {
      float* const k = state.data(qkv) + int64_t(t) * state.width(qkv) + layout.H * layout.k_dim;
      for (int i = 0; i < layout.G * layout.k_dim; ++i) k[i] -= params.key_offset[i];
    }
  }

  void check(const StepState& state) const {
    const StepArgs& s = state.step;
    check_layer(s, layer);
    const GroupArgs& g = s.groups[s.layers[layer].first];
    if (g.tables.G != layout.G || g.kv.k_dim != layout.k_dim || g.kv.v_dim != layout.v_dim)
      throw std::invalid_argument("the slots of the step have other sizes than the program's");
    retain::check(attention_args(state));
    if (layout.has_kv) retain::check(write_args(state));
  }
};

static SlotCache slot_cache(const StepArgs& s, int layer) {
  const auto [group, i] = s.layers[layer];
  const GroupArgs& g = s.groups[group];
  return {g.kv, g.tables.for_layer(i), g.slots + i * g.slot_layer_stride, g.slot_head_stride, g.slot_token_stride};
}

struct Program::ConvolutionOp {
  int in, out, layer;
  Convolution convolution;

  ConvolutionArgs args(const StepState& state) const {
    const StepArgs& s = state.step;
    return {slot_cache(s, layer), convolution, state.data(in), state.data(out), s.pos, nullptr};
  }

  void run(StepState& state, ThreadTeam::Member& member) const {
    retain::convolve(args(state), state.program.states_, member);
  }

  void check(const StepState& state) const {
    check_layer(state.step, layer);
    retain::check(args(state), state.step.T);
  }
};

struct Program::LinearAttentionOp {
  int qkv, gates, out, tokens_layer, states_layer;
  LinearAttention params;

  LinearAttentionArgs args(const StepState& state) const {
    const StepArgs& s = state.step;
    return {slot_cache(s, tokens_layer), slot_cache(s, states_layer), params, state.data(qkv), state.data(gates),
            state.data(out), s.pos};
  }

  void run(StepState& state, ThreadTeam::Member& member) const {
    retain::attend_linearly(args(state), state.program.states_, member);
  }

  void check(const StepState& state) const {
    check_layer(state.step, tokens_layer);
    check_layer(state.step, states_layer);
    retain::check(args(state), state.step.T);
  }
};

struct Program::GatherRowsOp {
  int in, out;

  void run(StepState& state, ThreadTeam::Member& member) const {
    const int64_t n = state.width(in);
    state.gather_rows();
    if (member.id != 0) return;
    for (int i = 0; i < state.step.N; ++i)
      memcpy(state.data(out) + i * n, state.data(in) + state.step.logits_indices[i] * n, n * 4);
  }

  void check(const StepState& state) const {
    for (int i = 0; i < state.step.N; ++i)
      if (state.step.logits_indices[i] < 0 || state.step.logits_indices[i] >= state.step.T)
        throw std::invalid_argument("logits_indices names a token outside the step");
  }
};

int Program::buffer(int width) {
  widths_.push_back(width);
  reserved_rows_ = 0;  // the new buffer has no memory yet
  return int(widths_.size()) - 1;
}

int Program::rope_table(const float* freqs, int n, float gain, bool interleaved) {
  rope_tables_.push_back({freqs, n, gain, interleaved, buffer(2 * n)});
  return int(rope_tables_.size()) - 1;
}

void Program::embedding(int out, const PackedWeight& table, bool by_position, int offset, float factor, bool add) {
  push_checked(EmbeddingOp{out, table, by_position, offset, factor, add});
}
void Program::norm(int in, int out, const NormParams& norm, int n, int heads, bool add, int first) {
  push(NormOp{in, out, norm, n, heads, add, first});
}
void Program::linear(int in, int out, const PackedWeight& weight, const float* bias, bool add, int first) {
  max_prepared_row_bytes_ = std::max(max_prepared_row_bytes_, max_activation_bytes(weight));
  max_bfloat16_row_bytes_ =
      std::max(max_bfloat16_row_bytes_, max_activation_bytes(weight.with(Products::bfloat16)));
  if (out == LOGITS) logits_width_ = std::max(logits_width_, first + weight.out);
  push(LinearOp{in, out, weight, bias, add, first});
}
void Program::head_linear(int in, int out, const PackedWeight& weight, const HeadColumns& source,
                          const HeadColumns& target) {
  max_prepared_row_bytes_ = std::max(max_prepared_row_bytes_, source.H * max_activation_bytes(weight));
  push(HeadLinearOp{in, out, weight, source, target});
}
void Program::copy_columns(int in, int out, const HeadColumns& source, const HeadColumns& target) {
  push(CopyColumnsOp{in, out, source, target});
}
void Program::activation(int in, int out, Activation kind, int n, bool gated) {
  push(ActivationOp{in, out, kind, n, gated});
}
void Program::experts(int in, int scores, int out, int hidden, int y, const Experts& experts, bool add) {
  max_prepared_row_bytes_ = std::max(max_prepared_row_bytes_, experts.prepared_bytes());
  push(ExpertsOp{in, scores, out, hidden, y, experts, add});
}
void Program::clip(int buffer, float limit) { push(ClipOp{buffer, limit}); }
void Program::softcap(int buffer, float limit) { push(SoftcapOp{buffer, limit}); }
void Program::multiply(int buffer, int by, int first) { push(MultiplyOp{buffer, by, first}); }
void Program::scale(int buffer, const float* factors, int n) { push(ScaleOp{buffer, factors, n}); }
void Program::scale_by_position(int buffer, int n, float beta, int period) {
  push(ScaleByPositionOp{buffer, n, beta, period});
}
void Program::rope(int buffer, int table, int heads, int D) { push(RopeOp{buffer, table, heads, D}); }
void Program::attend(int qkv, int out, int layer, QkvLayout layout, const AttentionParams& params) {
  push_checked(AttentionOp{qkv, out, layer, layout, params});
}
void Program::convolve(int in, int out, int layer, const Convolution& convolution) {
  if (convolution.window < 1 || convolution.window > MAX_WINDOW)
    throw std::invalid_argument("a convolution is over 1 to " + std::to_string(MAX_WINDOW) + " tokens");
  push_checked(ConvolutionOp{in, out, layer, convolution});
}
void Program::linear_attention(int qkv, int gates, int out, int tokens_layer, int states_layer,
                               const LinearAttention& params) {
  push_checked(LinearAttentionOp{qkv, gates, out, tokens_layer, states_layer, params});
}
void Program::gather_rows(int in, int out) { push_checked(GatherRowsOp{in, out}); }

// Allocates the rows of a step in every buffer, unless they have as many already.
void Program::reserve(const StepArgs& s) {
  const int rows = std::max({s.T, s.N, 1});
  const int64_t row_bytes =
      s.bfloat16_rows.empty() ? max_prepared_row_bytes_ : std::max(max_prepared_row_bytes_, max_bfloat16_row_bytes_);
  if (rows <= reserved_rows_ && row_bytes <= prepared_row_bytes_) return;
  reserved_rows_ = std::max(rows, reserved_rows_);
  prepared_row_bytes_ = std::max(row_bytes, prepared_row_bytes_);
  std::vector<int64_t> offsets;  // in floats; each buffer starts on a cache line
  int64_t total = 0;
  for (int width : widths_) {
    offsets.push_back(total);
    total += round_up(int64_t(width) * reserved_rows_, 16);
  }
  memory_ = AlignedVector<float>(total);
  buffers_.clear();
  for (int64_t offset : offsets) buffers_.push_back(memory_.data() + offset);
  // A part may begin in any row. Its products read rows behind its own, which another thread may be preparing, and drop
  // what they compute of them.
  prepared_ = AlignedVector<char>(prepared_row_bytes_ * (reserved_rows_ + MAX_PADDED_ROWS));
}

static void check_ranges(const StepArgs& s) {
  int end = 0;
  for (const RowRange& range : s.bfloat16_rows) {
    if (range.begin < end || range.end < range.begin || range.end > s.T)
      throw std::invalid_argument("bfloat16_rows must be ascending ranges of the step's tokens");
    end = range.end;
  }
}

// Computes cos [n] and sin [n] for each token and RoPE table, in float32 as torch does.
void Program::compute_rope_tables(const StepArgs& s, ThreadTeam::Member& member) {
  for (const RopeTable& r : rope_tables_) {
    member.parallel_for(s.T, [&](int begin, int end) {
      for (int t = begin; t < end; ++t) {
        float* cos = buffers_[r.buffer] + int64_t(t) * 2 * r.n;
        for (int i = 0; i < r.n; ++i) {
          const float angle = float(s.pos[t]) * r.freqs[i];
          cos[i] = std::cos(angle) * r.gain;
          cos[r.n + i] = std::sin(angle) * r.gain;
        }
      }
    });
    member.barrier();
  }
}

void Program::run(const StepArgs& step, int begin, int end) {
  const RowParts parts(step);
  if (begin == 0) {
    check_ranges(step);
    reserve(step);
    for (const auto& check : checks_) check({step, *this, parts});
  }
  ThreadTeam::run(false, [&](ThreadTeam::Member& member) {
    StepState state = {step, *this, parts};
    if (begin == 0) compute_rope_tables(step, member);
    for (int i = begin; i < end;) {
      const int next = end_of_row_ops(state, i, end, member.size);
      if (next > i) {
        run_row_blocks(state, i, next, member);
        i = next;
      } else {
        ops_[i++].run(state, member);
      }
      member.barrier();
    }
  });
}

// Returns the end of the operations from `begin` on that blocks of rows go through together; `begin` if there are few
// rows: every block reads all weights.
int Program::end_of_row_ops(const StepState& state, int begin, int end, int threads) const {
  if (state.rows < MIN_BLOCK_ROWS * threads) return begin;
  while (begin < end && ops_[begin].run_rows) ++begin;
  return begin;
}

// Runs operations on one block of rows after the other. So the rows stay in the caches of the thread that takes them,
// and no operation waits for another thread.
void Program::run_row_blocks(const StepState& state, int begin, int end, ThreadTeam::Member& member) {
  const int rounds = (state.rows + MAX_BLOCK_ROWS * member.size - 1) / (MAX_BLOCK_ROWS * member.size);
  const int blocks = rounds * member.size;
  const int size = int(round_up((state.rows + blocks - 1) / blocks, MAX_PADDED_ROWS));
  member.parallel_for((state.rows + size - 1) / size, 1, [&](int first, int last) {
    for (int block = first; block < last; ++block)
      for (int i = begin; i < end; ++i)
        ops_[i].run_rows(state, block * size, std::min(state.rows, (block + 1) * size));
  });
}

}  // namespace retain
