// The operations of a program: what each computes, and how it is made of the record that Python hands over.
//
// An operation that computes each row from the same row alone has `run_rows(state, begin, end)`, for one thread. One
// that divides few rows otherwise, or needs other rows, has `run(state, member)`: all threads call it, and a barrier
// follows. An operation may have `check(state)`, which throws if the step is invalid.
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "program/record.h"

namespace retain {

using State = Program::StepState;

struct EmbeddingOp {
  int out;
  PackedWeight table;
  bool by_position;
  int offset;
  float factor;
  bool add;
  bool is_part = false;  // rows that the table does not have are 0

  void run_rows(const State& state, int begin, int end) const {
    const int width = state.width(out);
    for (int t = begin; t < end; ++t) {
      float* const row = state.data(out) + int64_t(t) * width;
      const int64_t i = index(state, t);
      if (has(i)) selected_isa().unpack_row(table, i, factor, add, row);
      else std::fill(row, row + width, 0.0f);
    }
  }

  int64_t index(const State& state, int t) const {
    return (by_position ? state.step.pos[t] : state.step.ids[t]) + offset;
  }
  bool has(int64_t i) const { return i >= 0 && i < table.out; }

  void check(const State& state) const {
    for (int t = 0; t < state.step.T; ++t)
      if (!is_part && !has(index(state, t)))
        throw std::invalid_argument(by_position ? "positions names a row outside the position embedding"
                                                : "input_ids names a row outside the embedding");
  }
};

struct NormOp {
  int in, out;
  NormParams norm;
  int n, heads;  // a row is `heads` times n numbers; each head has its own weights
  bool add;
  int first;  // the number of a row at which the heads begin

  void run_rows(const State& state, int begin, int end) const {
    for (int t = begin; t < end; ++t)
      for (int h = 0; h < heads; ++h) {
        const float* x = state.data(in) + int64_t(t) * state.width(in) + first + h * n;
        float* y = state.data(out) + int64_t(t) * state.width(out) + first + h * n;
        selected_isa().normalize({norm.weight + h * n, norm.bias, norm.eps, norm.subtract_mean}, x, n, add, y);
      }
  }
};

struct LinearOp {
  int in, out;
  PackedWeight weight;
  const float* bias;
  bool add;
  int first;

  void run(State& state, ThreadTeam::Member& member) const {
    packed_gemm(weight, state.data(in), state.width(in), state.parts_for(weight), state.program.prepared(0),
                state.program.prepared_row_bytes(), outputs(state, 0), member);
  }

  void run_rows(const State& state, int begin, int end) const {
    for (const RowPart& p : state.parts_for(weight)) {
      const int first = std::max(begin, p.begin), last = std::min(end, p.end);
      if (first >= last) continue;
      packed_gemm(weight.with(p.products), state.data(in) + int64_t(first) * state.width(in), state.width(in),
                  last - first, state.program.prepared(first), outputs(state, first));
    }
  }

  OutputView outputs(const State& state, int row) const {
    const int64_t width = state.width(out);
    return {state.data(out) + row * width + first, width, bias, add};
  }
};

struct LowRankOp {
  int in, out;
  LowRank adapters;
  int n, first;

  static constexpr bool NEEDS_NO_BARRIER = true;  // those behind one product add to other columns

  // Rows of one adapter, which share what is loaded of it.
  struct Group {
    const float* x[MAX_LOW_RANK_ROWS];
    float* y[MAX_LOW_RANK_ROWS];
    int adapter, rows;
  };

  bool is_idle(const State& state) const { return !state.step.adapters; }

  void run_rows(const State& state, int begin, int end) const {
    if (!is_idle(state)) for_groups(state, begin, end, MAX_LOW_RANK_ROWS, [&](const Group& group) { add(group); });
  }

  void run(State& state, ThreadTeam::Member& member) const {
    const int size = std::clamp((state.rows + member.size - 1) / member.size, 1, MAX_LOW_RANK_ROWS);
    int i = 0, last = -1;
    for_groups(state, 0, state.rows, size, [&](const Group& group) {
      if (i++ % member.size != member.id) return;
      if (std::exchange(last, group.adapter) != group.adapter) {
        prefetch(adapters.a, group.adapter, adapters.in);
        prefetch(adapters.b, group.adapter, adapters.columns);
      }
      add(group);
    });
  }

  // Reads ahead: the matrices of an adapter are too short for the processor to see streams.
  void prefetch(const char* matrices, int adapter, int columns) const {
    const int64_t row = int64_t(columns) * (adapters.is_bfloat16 ? 2 : 4);
    const char* const own = matrices + adapter * adapters.rank * row;
    for (int64_t i = 0; i < std::min(adapters.ranks[adapter], adapters.rank) * row; i += 64) __builtin_prefetch(own + i);
  }

  void add(const Group& group) const {
    selected_isa().add_low_rank(adapters, group.adapter, group.x, group.y, group.rows);
  }

  // Calls f with groups of at most `size` rows. Rows of a group are near to each other.
  template <class F>
  void for_groups(const State& state, int begin, int end, int size, F f) const {
    constexpr int WINDOW = 64;
    const int32_t* const chosen = state.step.adapters;
    for (; begin < end; begin += WINDOW) {
      uint64_t taken = 0;
      const int last = std::min(end, begin + WINDOW);
      for (int t = begin; t < last; ++t) {
        if (chosen[t] < 0 || taken >> (t - begin) & 1) continue;
        Group group = {{}, {}, chosen[t], 0};
        for (int other = t; other < last && group.rows < size; ++other) {
          if (chosen[other] != chosen[t] || taken >> (other - begin) & 1) continue;
          taken |= uint64_t(1) << (other - begin);
          group.x[group.rows] = state.data(in) + int64_t(other) * state.width(in);
          group.y[group.rows++] = state.data(out) + int64_t(other) * state.width(out) + first;
        }
        f(group);
      }
    }
  }

  void check(const State& state) const {
    for (int t = 0; state.step.adapters && t < state.step.T; ++t)
      if (state.step.adapters[t] >= n) throw std::invalid_argument("a token has an adapter that the program has not");
  }
};

struct HeadLinearOp {
  int in, out;
  PackedWeight weight;
  HeadColumns source, target;

  void run(State& state, ThreadTeam::Member& member) const {
    packed_gemm_by_head(weight, state.data(in), state.width(in), state.rows, state.program.prepared(0), state.data(out),
                        state.width(out), source, target, member);
  }
};

struct CopyColumnsOp {
  int in, out;
  HeadColumns source, target;

  void run_rows(const State& state, int begin, int end) const {
    for (int t = begin; t < end; ++t)
      for (int h = 0; h < source.H; ++h)
        memcpy(state.data(out) + int64_t(t) * state.width(out) + target.begin(h),
               state.data(in) + int64_t(t) * state.width(in) + source.begin(h), size_t(source.width) * 4);
  }
};

struct ActivationOp {
  int in, out;
  Activation kind;
  int n;
  bool gated;  // activation(first half of a row) * second half

  void run_rows(const State& state, int begin, int end) const {
    for (int t = begin; t < end; ++t) {
      const float* x = state.data(in) + int64_t(t) * state.width(in);
      selected_isa().activate(kind, x, gated ? x + n : nullptr, n,
                              state.data(out) + int64_t(t) * state.width(out));
    }
  }
};

struct ExpertsOp {
  int in, scores, out, hidden, y;
  Experts experts;
  bool add;

  void run(State& state, ThreadTeam::Member& member) const {
    Program& p = state.program;
    const OutputView to = {state.data(out), state.width(out), nullptr, add};
    mix_experts(experts, {state.data(in), state.data(scores), state.rows, state.data(hidden), state.data(y), to},
                p.experts(), p.prepared(0), member);
  }
};

struct ClipOp {
  int buffer;
  float limit;

  void run_rows(const State& state, int begin, int end) const {
    const int64_t n = state.width(buffer);
    for (int64_t i = begin * n; i < end * n; ++i) {
      float& x = state.data(buffer)[i];
      x = std::min(std::max(x, -limit), limit);
    }
  }
};

struct SoftcapOp {
  int buffer;
  float limit;

  void run_rows(const State& state, int begin, int end) const {
    const int n = state.width(buffer);
    for (int t = begin; t < end; ++t) {
      float* x = state.data(buffer) + int64_t(t) * n;
      for (int i = 0; i < n; ++i) x[i] *= 2 / limit;  // tanh(y) = 2 sigmoid(2 y) - 1
      selected_isa().activate(Activation::sigmoid, x, nullptr, n, x);
      for (int i = 0; i < n; ++i) x[i] = limit * (2 * x[i] - 1);
    }
  }
};

struct MultiplyOp {
  int buffer, by, first;

  void run_rows(const State& state, int begin, int end) const {
    const int n = state.width(buffer);
    for (int t = begin; t < end; ++t) {
      float* x = state.data(buffer) + int64_t(t) * n;
      const float* factors = state.data(by) + int64_t(t) * state.width(by) + first;
      for (int i = 0; i < n; ++i) x[i] *= factors[i];
    }
  }
};

struct ScaleOp {
  int buffer;
  const float* factors;
  int n;

  void run_rows(const State& state, int begin, int end) const {
    for (int t = begin; t < end; ++t) {
      float* x = state.data(buffer) + int64_t(t) * state.width(buffer);
      for (int i = 0; i < n; ++i) x[i] *= factors[i];
    }
  }
};

struct ScaleByPositionOp {
  int buffer, n;
  float beta;
  int period;

  void run_rows(const State& state, int begin, int end) const {
    for (int t = begin; t < end; ++t) {
      float* x = state.data(buffer) + int64_t(t) * state.width(buffer);
      const float factor = 1 + beta * std::log1p(float(state.step.pos[t] / period));
      for (int i = 0; i < n; ++i) x[i] *= factor;
    }
  }
};

struct RopeOp {
  int buffer, table, heads, D;

  void run_rows(const State& state, int begin, int end) const {
    const Program::RopeTable& r = state.program.rope_table(table);
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

static void check_sizes(const StepArgs& s, int layer, const QkvLayout& layout) {
  check_layer(s, layer);
  const GroupArgs& g = s.groups[s.layers[layer].first];
  if (g.tables.G != layout.G || g.kv.k_dim != layout.k_dim || g.kv.v_dim != layout.v_dim)
    throw std::invalid_argument("the slots of the step have other sizes than the program's");
}

static WriteArgs write_args(const State& state, int qkv, int layer, const QkvLayout& layout) {
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

struct AttentionOp {
  int qkv, out, layer;
  QkvLayout layout;
  AttentionParams params;

  AttentionArgs attention_args(const State& state) const {
    const StepArgs& s = state.step;
    const auto [group, i] = s.layers[layer];
    const GroupArgs& g = s.groups[group];
    const StridedRows q = {state.data(qkv), state.width(qkv), layout.k_dim, DType::float32};
    AttentionScoring scoring = layout.has_kv ? s.scoring : AttentionScoring();
    scoring.layer = layer;
    return {g.kv, g.tables.for_layer(i), g.demoted_kv, g.demoted_tables.for_layer(i), q, state.data(out), s.pos, s.T,
            layout.H / layout.G, params, scoring};
  }

  void run(State& state, ThreadTeam::Member& member) const {
    const AttentionArgs args = attention_args(state);
    if (member.id == 0) state.program.attention().build(args, member.size);
    if (layout.has_kv) {
      const WriteArgs write = write_args(state, qkv, layer, layout);
      member.parallel_for(write.T, [&](int begin, int end) {
        if (params.key_offset) subtract_offset(state, begin, end);
        for (int g = 0; g < layout.G; ++g) selected_isa().write(write, g, begin, end);
      });
    }
    member.barrier();
    if (layout.has_kv && args.kv.sketches) {
      const WriteArgs write = write_args(state, qkv, layer, layout);
      member.parallel_for(write.T, [&](int begin, int end) {
        for (int t = begin; t < end; ++t) sketch_token(write, t);
      });
      member.barrier();
    }
    retain::attend(args, state.program.attention(), member);
  }

  void subtract_offset(const State& state, int begin, int end) const {
    for (int t = begin; t < end; ++t) {
      float* const k = state.data(qkv) + int64_t(t) * state.width(qkv) + layout.H * layout.k_dim;
      for (int i = 0; i < layout.G * layout.k_dim; ++i) k[i] -= params.key_offset[i];
    }
  }

  void check(const State& state) const {
    check_sizes(state.step, layer, layout);
    retain::check(attention_args(state));
    if (layout.has_kv) retain::check(write_args(state, qkv, layer, layout));
  }
};

struct WriteCacheOp {
  int rows, layer;
  QkvLayout layout;

  // Tokens at position 0 have no hidden state before them: their slots stay holes.
  void run(State& state, ThreadTeam::Member& member) const {
    const WriteArgs write = write_args(state, rows, layer, layout);
    member.parallel_for(write.T, [&](int begin, int end) {
      for (int t = begin; t <= end; ++t) {
        if (t < end && write.pos[t] > 0) continue;
        for (int g = 0; g < layout.G && begin < t; ++g) selected_isa().write(write, g, begin, t);
        begin = t + 1;
      }
    });
    if (!write.kv.sketches) return;
    member.barrier();
    member.parallel_for(write.T, [&](int begin, int end) {
      for (int t = begin; t < end; ++t)
        if (write.pos[t] > 0) sketch_token(write, t);
    });
  }

  void check(const State& state) const {
    check_sizes(state.step, layer, layout);
    retain::check(write_args(state, rows, layer, layout));
  }
};

static SlotCache slot_cache(const StepArgs& s, int layer) {
  const auto [group, i] = s.layers[layer];
  const GroupArgs& g = s.groups[group];
  return {g.kv, g.tables.for_layer(i), g.slots + i * g.slot_layer_stride, g.slot_head_stride, g.slot_token_stride};
}

struct ConvolutionOp {
  int in, out, layer;
  Convolution convolution;

  ConvolutionArgs args(const State& state) const {
    const StepArgs& s = state.step;
    return {slot_cache(s, layer), convolution, state.data(in), state.data(out), s.pos, nullptr};
  }

  void run(State& state, ThreadTeam::Member& member) const {
    retain::convolve(args(state), state.program.states(), member);
  }

  void check(const State& state) const {
    check_layer(state.step, layer);
    retain::check(args(state), state.step.T);
  }
};

struct LinearAttentionOp {
  int qkv, gates, out, tokens_layer, states_layer;
  LinearAttention params;

  LinearAttentionArgs args(const State& state) const {
    const StepArgs& s = state.step;
    return {slot_cache(s, tokens_layer), slot_cache(s, states_layer), params, state.data(qkv), state.data(gates),
            state.data(out), s.pos};
  }

  void run(State& state, ThreadTeam::Member& member) const {
    retain::attend_linearly(args(state), state.program.states(), member);
  }

  void check(const State& state) const {
    check_layer(state.step, tokens_layer);
    check_layer(state.step, states_layer);
    retain::check(args(state), state.step.T);
  }
};

struct LoadHiddenStatesOp {
  int out, in;  // `in` is below 0 where each request has one fresh token

  void run(State& state, ThreadTeam::Member& member) const {
    const StepArgs& s = state.step;
    const PageTables& tables = s.groups[0].tables;
    const int64_t n = state.width(out);
    float* const y = state.data(out);
    member.parallel_for(s.T, [&](int begin, int end) {
      const int first = std::max(begin, 1);
      if (in >= 0 && first < end) memcpy(y + first * n, state.data(in) + (first - 1) * n, size_t(end - first) * n * 4);
      for (int b = 0; b < tables.B; ++b)
        if (const int t = tables.query_start_loc[b]; tables.num_fresh(b) && begin <= t && t < end)
          memcpy(y + t * n, s.hidden_states + b * n, size_t(n) * 4);
    });
  }

  void check(const State& state) const {
    const StepArgs& s = state.step;
    if (!s.hidden_states || s.hidden_size != state.width(out))
      throw std::invalid_argument("the program needs " + std::to_string(state.width(out)) +
                                  " hidden numbers of each request");
    if (in < 0 && (s.groups.empty() || s.groups[0].tables.B != s.T))
      throw std::invalid_argument("the program needs one fresh token of each request");
  }
};

// Rows of all ranks side by side, in the order of ranks.
struct AllGatherOp {
  int in, out;
  RankMemory ranks;

  void run(State& state, ThreadTeam::Member& member) const {
    if (member.id != 0) return;
    const int width = state.width(in), stride = state.width(out);
    const auto copy = [&](int rank, int first, int n, const float* rows) {
      float* const to = state.data(out) + int64_t(first) * stride + int64_t(rank) * width;
      for (int t = 0; t < n; ++t) memcpy(to + int64_t(t) * stride, rows + int64_t(t) * width, size_t(width) * 4);
    };
    if (!ranks.exchange(state.data(in), state.rows, width, copy)) state.program.fail();
  }
};

// The sum of the rows of all ranks, added in the order of ranks.
struct AllReduceOp {
  int in, out, total;  // `total` is a buffer for the sum
  bool add;
  RankMemory ranks;

  void run(State& state, ThreadTeam::Member& member) const {
    if (member.id != 0) return;
    const int64_t width = state.width(in), n = state.rows * width;
    float* const sum = state.data(total);
    const auto add_up = [&](int rank, int first, int rows, const float* x) {
      float* const to = sum + first * width;
      if (rank == 0) memcpy(to, x, rows * width * 4);
      else for (int64_t i = 0; i < rows * width; ++i) to[i] += x[i];
    };
    if (!ranks.exchange(state.data(in), state.rows, int(width), add_up)) state.program.fail();
    float* const y = state.data(out);
    for (int64_t i = 0; i < n; ++i) y[i] = add ? y[i] + sum[i] : sum[i];
  }
};

struct GatherRowsOp {
  int in, out;

  void run(State& state, ThreadTeam::Member& member) const {
    const int64_t n = state.width(in);
    state.gather_rows();
    if (member.id != 0) return;
    for (int i = 0; i < state.step.N; ++i)
      memcpy(state.data(out) + i * n, state.data(in) + state.step.logits_indices[i] * n, n * 4);
  }

  void check(const State& state) const {
    for (int i = 0; i < state.step.N; ++i)
      if (state.step.logits_indices[i] < 0 || state.step.logits_indices[i] >= state.step.T)
        throw std::invalid_argument("logits_indices names a token outside the step");
  }
};

static void add_matmul(Program& p, const Record& r) {
  const LinearOp op = {r.get("x"), r.get("out"), r.weight("weight"), r.numbers("bias"), r.flag("add"), r.get("first")};
  p.reserve_prepared(max_activation_bytes(op.weight), max_activation_bytes(op.weight.with(Products::bfloat16)));
  if (op.out == Program::LOGITS) p.reserve_logits(op.first + op.weight.out);
  p.push(op);
}

static void add_low_rank(Program& p, const Record& r) {
  const LowRank adapters = {r.bytes("a"), r.bytes("b"), r.integers("ranks"), r.get("rank"), p.width(r.get("x")),
                            r.get("columns"), r.flag("is_bfloat16")};
  if (adapters.rank > MAX_LOW_RANK)
    throw std::invalid_argument("adapters have a rank of at most " + std::to_string(MAX_LOW_RANK));
  p.push(LowRankOp{r.get("x"), r.get("out"), adapters, r.get("n"), r.get("first")});
}

static void add_head_matmul(Program& p, const Record& r) {
  const HeadLinearOp op = {r.get("x"), r.get("out"), r.weight("weight"), r.columns("source"), r.columns("target")};
  p.reserve_prepared(op.source.H * max_activation_bytes(op.weight));
  p.push(op);
}

static void add_experts(Program& p, const Record& r) {
  const auto& experts = r.as<const Experts&>("experts");
  p.reserve_prepared(experts.prepared_bytes());
  p.push(ExpertsOp{r.get("x"), r.get("scores"), r.get("out"), r.get("hidden"), r.get("outputs"), experts,
                   r.flag("add")});
}

static void add_convolution(Program& p, const Record& r) {
  const Convolution convolution = {r.numbers("weight"), r.numbers("bias"), r.get("channels"), r.get("window")};
  if (convolution.window < 1 || convolution.window > MAX_WINDOW)
    throw std::invalid_argument("a convolution is over 1 to " + std::to_string(MAX_WINDOW) + " tokens");
  p.push(ConvolutionOp{r.get("x"), r.get("out"), r.get("cache"), convolution});
}

static void add_attention(Program& p, const Record& r) {
  const auto [H, G, D] = r.as<std::tuple<int, int, int>>("heads");
  p.push(AttentionOp{r.get("qkv"), r.get("out"), r.get("cache"), {H, G, D, r.get("v_dim"), r.flag("has_kv")},
                     r.as<const AttentionParams&>("params")});
}

static void add_write_cache(Program& p, const Record& r) {
  const auto [H, G, D] = r.as<std::tuple<int, int, int>>("heads");
  p.push(WriteCacheOp{r.get("out"), r.get("cache"), {H, G, D, r.get("v_dim"), true}});
}

static void add_linear_attention(Program& p, const Record& r) {
  const auto [tokens, states] = r.as<std::pair<int, int>>("caches");
  p.push(LinearAttentionOp{r.get("qkv"), r.get("gates"), r.get("out"), tokens, states,
                           r.as<const LinearAttention&>("params")});
}

static void add_norm(Program& p, const Record& r) {
  const NormParams norm = {r.numbers("weight"), r.numbers("bias"), r.real("eps"), r.flag("subtract_mean")};
  p.push(NormOp{r.get("x"), r.get("out"), norm, r.get("n"), r.get("heads"), r.flag("add"), r.get("first")});
}

// By the names of their classes in kernels/ops.py. A rotation is a part of attention there.
using Add = void (*)(Program&, const Record&);
static const std::unordered_map<std::string, Add> OPERATIONS = {
    {"Embed",
     [](Program& p, const Record& r) {
       p.push(EmbeddingOp{r.get("out"), r.weight("table"), false, -r.get("first"), r.real("factor"), false,
                         r.flag("is_part")});
     }},
    {"EmbedPosition",
     [](Program& p, const Record& r) {
       p.push(EmbeddingOp{r.get("out"), r.weight("table"), true, r.get("offset"), 1, true});
     }},
    {"Norm", add_norm},
    {"MatMul", add_matmul},
    {"LowRank", add_low_rank},
    {"HeadMatMul", add_head_matmul},
    {"CopyColumns",
     [](Program& p, const Record& r) {
       p.push(CopyColumnsOp{r.get("x"), r.get("out"), r.columns("source"), r.columns("target")});
     }},
    {"Activate",
     [](Program& p, const Record& r) {
       p.push(ActivationOp{r.get("x"), r.get("out"), Activation(r.get("act")), r.get("n"), r.flag("gated")});
     }},
    {"MixExperts", add_experts},
    {"Clip", [](Program& p, const Record& r) { p.push(ClipOp{r.get("out"), r.real("limit")}); }},
    {"Softcap", [](Program& p, const Record& r) { p.push(SoftcapOp{r.get("out"), r.real("limit")}); }},
    {"Multiply",
     [](Program& p, const Record& r) { p.push(MultiplyOp{r.get("out"), r.get("by"), r.get("first")}); }},
    {"Scale", [](Program& p, const Record& r) { p.push(ScaleOp{r.get("out"), r.numbers("factors"), r.get("n")}); }},
    {"ScaleByPosition",
     [](Program& p, const Record& r) {
       p.push(ScaleByPositionOp{r.get("out"), r.get("n"), r.real("beta"), r.get("period")});
     }},
    {"Rotate",
     [](Program& p, const Record& r) {
       p.push(RopeOp{r.get("out"), r.get("table"), r.get("heads"), r.get("head_dim")});
     }},
    {"Attend", add_attention},
    {"Convolve", add_convolution},
    {"AttendLinearly", add_linear_attention},
    {"WriteCache", add_write_cache},
    {"LoadHiddenStates",
     [](Program& p, const Record& r) { p.push(LoadHiddenStatesOp{r.get("out"), r.get("x")}); }},
    {"AllGather",
     [](Program& p, const Record& r) {
       p.push(AllGatherOp{r.get("x"), r.get("out"), r.as<const RankMemory&>("group")});
     }},
    {"AllReduce",
     [](Program& p, const Record& r) {
       p.push(AllReduceOp{r.get("x"), r.get("out"), r.get("total"), r.flag("add"), r.as<const RankMemory&>("group")});
     }},
    {"GatherRows", [](Program& p, const Record& r) { p.push(GatherRowsOp{r.get("x"), r.get("out")}); }},
};

void add_operation(Program& program, const std::string& name, const Record& record) {
  const auto found = OPERATIONS.find(name);
  if (found == OPERATIONS.end()) throw std::invalid_argument("there is no operation " + name);
  found->second(program, record);
}

}  // namespace retain
