// The operations of a program, and how it runs.
#include "program.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

namespace retain {

struct Program::Now {
  const Step& step;
  Program& program;
  int rows;  // T, or N after `pick`

  float* at(int buffer) const { return buffer == LOGITS ? step.logits : program.at_[buffer]; }
  int width(int buffer) const { return program.widths_[buffer]; }
};

// An operation has `run(now, me)`, after which comes a barrier, and perhaps `check(now)`, which throws.
template <class T>
void Program::push(const T& op) {
  ops_.push_back([op](Now& now, Team::Member& me) { op.run(now, me); });
}
template <class T>
void Program::push_checked(const T& op) {
  checks_.push_back([op](const Now& now) { op.check(now); });
  push(op);
}

struct Program::Lookup {
  int out;
  Packed table;
  bool by_position;
  int offset;
  float factor;
  bool add;

  void run(Now& now, Team::Member& me) const {
    const int width = now.width(out);
    me.share(now.rows, [&](int begin, int end) {
      for (int t = begin; t < end; ++t)
        isa().lookup(table, index(now, t), factor, add, now.at(out) + int64_t(t) * width);
    });
  }

  int64_t index(const Now& now, int t) const { return by_position ? now.step.pos[t] + offset : now.step.ids[t]; }

  void check(const Now& now) const {
    for (int t = 0; t < now.step.T; ++t)
      if (const int64_t i = index(now, t); i < 0 || i >= table.out)
        throw std::invalid_argument("a token or a position outside its table");
  }
};

struct Program::Normalise {
  int in, out;
  Norm norm;
  int n, heads;  // a row is heads of n numbers, each with weights of its own
  bool add;

  void run(Now& now, Team::Member& me) const {
    me.share(now.rows, [&](int begin, int end) {
      for (int t = begin; t < end; ++t)
        for (int h = 0; h < heads; ++h) {
          const float* x = now.at(in) + int64_t(t) * now.width(in) + h * n;
          float* y = now.at(out) + int64_t(t) * now.width(out) + h * n;
          isa().normalise({norm.weight + h * n, norm.bias, norm.eps, norm.centred}, x, n, add, y);
        }
    });
  }
};

struct Program::Linear {
  int in, out;
  Packed weight;
  const float* bias;
  bool add;

  void run(Now& now, Team::Member& me) const {
    const int64_t ldy = out == LOGITS ? weight.out : now.width(out);
    retain::linear(weight, now.at(in), now.width(in), now.rows, now.program.prepared_.data(),
                   {now.at(out), ldy, bias, add}, me);
  }
};

struct Program::Activate {
  int in, out;
  Activation kind;
  int n;
  bool gated;  // the first half of a row, then times the second

  void run(Now& now, Team::Member& me) const {
    me.share(now.rows, [&](int begin, int end) {
      for (int t = begin; t < end; ++t) {
        const float* x = now.at(in) + int64_t(t) * now.width(in);
        isa().activate(kind, x, gated ? x + n : nullptr, n, now.at(out) + int64_t(t) * now.width(out));
      }
    });
  }
};

struct Program::Clip {
  int buffer;
  float limit;

  void run(Now& now, Team::Member& me) const {
    const int64_t n = now.width(buffer);
    me.share(now.rows, [&](int begin, int end) {
      for (int64_t i = begin * n; i < end * n; ++i) {
        float& x = now.at(buffer)[i];
        x = std::min(std::max(x, -limit), limit);
      }
    });
  }
};

struct Program::Turn {
  int buffer, rope, heads, D;

  void run(Now& now, Team::Member& me) const {
    const Rope& r = now.program.ropes_[rope];
    me.share(now.rows, [&](int begin, int end) {
      for (int t = begin; t < end; ++t)
        for (int h = 0; h < heads; ++h)
          isa().turn(now.at(buffer) + int64_t(t) * now.width(buffer) + h * D, now.at(r.buffer) + int64_t(t) * 2 * r.n,
                     r.n, r.neighbours);
    });
  }
};

struct Program::Look {
  int qkv, out, layer;
  Heads heads;
  float scale;
  const float* slopes;

  Attend attend_of(const Now& now) const {
    const Step& s = now.step;
    Tables t = s.tables;
    t.pages += layer * s.page_layer;
    t.counts += layer * s.count_layer;
    t.windows += layer * s.window_layer;
    const Rows q = {now.at(qkv), now.width(qkv), heads.D, Type::float32};
    Observe observe = s.observe;
    observe.layer = layer;
    return {s.kv, t, q, now.at(out), s.pos, s.T, heads.H / heads.G, scale, slopes, observe};
  }

  Write write_of(const Now& now) const {
    const Step& s = now.step;
    const int64_t width = now.width(qkv);
    const float* k = now.at(qkv) + heads.H * heads.D;
    const Rows keys = {k, width, heads.D, Type::float32};
    const Rows values = {k + heads.G * heads.D, width, heads.D, Type::float32};
    return {s.kv, keys, values, s.slots + layer * s.slot_layer, s.slot_head, s.slot_token, s.pos, s.T, heads.G};
  }

  void run(Now& now, Team::Member& me) const {
    const Write write = write_of(now);
    const Attend a = attend_of(now);
    if (me.id == 0) now.program.work_.make(a, me.size);
    me.share(write.T, [&](int begin, int end) {
      for (int g = 0; g < heads.G; ++g) isa().write(write, g, begin, end);
    });
    me.barrier();
    retain::attend(a, now.program.work_, me);
  }

  void check(const Now& now) const {
    if (layer >= now.step.layers) throw std::invalid_argument("the step has tables of fewer layers than the program");
    retain::check(attend_of(now));
    retain::check(write_of(now));
  }
};

struct Program::Pick {
  int in, out;

  void run(Now& now, Team::Member& me) const {
    const int64_t n = now.width(in);
    now.rows = now.step.N;
    if (me.id != 0) return;
    for (int i = 0; i < now.step.N; ++i) memcpy(now.at(out) + i * n, now.at(in) + now.step.wanted[i] * n, n * 4);
  }

  void check(const Now& now) const {
    for (int i = 0; i < now.step.N; ++i)
      if (now.step.wanted[i] < 0 || now.step.wanted[i] >= now.step.T)
        throw std::invalid_argument("wanted names a token that is not there");
  }
};

int Program::buffer(int width) {
  widths_.push_back(width);
  rows_ = 0;  // nothing is reserved any more
  return int(widths_.size()) - 1;
}

int Program::rope(const float* freqs, int n, float gain, bool neighbours) {
  ropes_.push_back({freqs, n, gain, neighbours, buffer(2 * n)});
  return int(ropes_.size()) - 1;
}

void Program::lookup(int out, const Packed& table, bool by_position, int offset, float factor, bool add) {
  push_checked(Lookup{out, table, by_position, offset, factor, add});
}
void Program::normalise(int in, int out, const Norm& norm, int n, int heads, bool add) {
  push(Normalise{in, out, norm, n, heads, add});
}
void Program::linear(int in, int out, const Packed& weight, const float* bias, bool add) {
  prepared_bytes_ = std::max(prepared_bytes_, weight.row_bytes());
  push(Linear{in, out, weight, bias, add});
}
void Program::activate(int in, int out, Activation kind, int n, bool gated) {
  push(Activate{in, out, kind, n, gated});
}
void Program::clip(int buffer, float at) { push(Clip{buffer, at}); }
void Program::turn(int buffer, int rope, int heads, int D) { push(Turn{buffer, rope, heads, D}); }
void Program::attend(int qkv, int out, int layer, Heads heads, float scale, const float* slopes) {
  push_checked(Look{qkv, out, layer, heads, scale, slopes});
}
void Program::pick(int in, int out) { push_checked(Pick{in, out}); }

// Room for so many rows in every buffer. It only grows.
void Program::reserve(int rows) {
  if (rows <= rows_) return;
  rows_ = rows;
  std::vector<int64_t> offsets;
  int64_t total = 16;
  for (int width : widths_) {
    offsets.push_back(total);
    total += round_up(int64_t(width) * rows, 16);
  }
  memory_ = std::vector<float>(total);
  float* base = memory_.data() + (-(reinterpret_cast<uintptr_t>(memory_.data()) / 4) & 15);  // on a cache line
  at_.clear();
  for (int64_t offset : offsets) at_.push_back(base + offset - 16);
  prepared_ = std::vector<char>(prepared_bytes_ * rows);
}

// Of all positions and ropes of the step: for each token cos [n], then sin [n], in float32 as torch computes them.
void Program::angles(const Step& s, Team::Member& me) {
  for (const Rope& r : ropes_) {
    me.share(s.T, [&](int begin, int end) {
      for (int t = begin; t < end; ++t) {
        float* cos = at_[r.buffer] + int64_t(t) * 2 * r.n;
        for (int i = 0; i < r.n; ++i) {
          const float angle = float(s.pos[t]) * r.freqs[i];
          cos[i] = std::cos(angle) * r.gain;
          cos[r.n + i] = std::sin(angle) * r.gain;
        }
      }
    });
    me.barrier();
  }
}

void Program::run(const Step& step, int begin, int end) {
  if (begin == 0) {
    reserve(std::max(step.T, step.N));
    for (const auto& check : checks_) check({step, *this, step.T});
  }
  Team::run(false, [&](Team::Member& me) {
    Now now = {step, *this, step.T};
    if (begin == 0) angles(step, me);
    for (int i = begin; i < end; ++i) {
      ops_[i](now, me);
      me.barrier();
    }
  });
}

}  // namespace retain
