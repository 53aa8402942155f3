// The buffers of a program, and the loop that runs its operations.
#include "program/program.h"

#include <cmath>
#include <stdexcept>
#include <utility>

namespace retain {

// Bounds of the rows that a thread takes through several operations at a time.
constexpr int MIN_BLOCK_ROWS = 32, MAX_BLOCK_ROWS = 128;

RowParts::RowParts(const StepArgs& step)
    : whole{{Products::integers, 0, step.T}}, gathered{{Products::integers, 0, step.N}} {
  int begin = 0;
  for (const RowRange& range : step.bfloat16_rows) {
    if (begin < range.begin) quantized.push_back({Products::integers, begin, range.begin});
    if (range.begin < range.end) quantized.push_back({Products::bfloat16, range.begin, range.end});
    begin = range.end;
  }
  if (begin < step.T || quantized.empty()) quantized.push_back({Products::integers, begin, step.T});
}

int Program::buffer(int width) {
  widths_.push_back(width);
  reserved_rows_ = 0;  // the new buffer has no memory yet
  return int(widths_.size()) - 1;
}

int Program::add_rope_table(const float* freqs, int n, float gain, bool interleaved) {
  rope_tables_.push_back({freqs, n, gain, interleaved, buffer(2 * n)});
  return int(rope_tables_.size()) - 1;
}

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

bool Program::run(const StepArgs& step, int begin, int end) {
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
        const Operation& op = ops_[i++];
        if (op.is_idle && op.is_idle(state)) continue;
        op.run(state, member);
        if (op.joins_next && i < end) continue;
      }
      member.barrier();
    }
  });
  return !std::exchange(has_failed_, false);
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
