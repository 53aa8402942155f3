// attend: jobs over the cores, records merged span by span, sums divided.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace retain {

static void clear(float* records, int rows, int D) {
  for (int r = 0; r < rows; ++r) {
    float* x = records + r * record_size(D);
    std::fill_n(x, D, 0.0f);
    record_max(x, D) = NOTHING;
    record_sum(x, D) = 0.0f;
  }
}

// Take the next span's records into those of the spans before it.
static void merge(float* into, const float* from, int rows, int D) {
  const int size = record_size(D);
  for (int r = 0; r < rows; ++r, into += size, from += size) {
    if (record_max(from, D) == NOTHING) continue;
    const float top = std::max(record_max(into, D), record_max(from, D));
    const float old = std::exp(record_max(into, D) - top), fresh = std::exp(record_max(from, D) - top);
    for (int d = 0; d < D; ++d) into[d] = into[d] * old + from[d] * fresh;
    record_sum(into, D) = record_sum(into, D) * old + record_sum(from, D) * fresh;
    record_max(into, D) = top;
  }
}

// Divide and put the rows where they belong; a row that saw nothing is 0.
static void finish(const Attend& a, const Tile& t, float* records) {
  const int D = a.kv.D;
  const int64_t H = int64_t(a.tables.G) * a.R, first = a.tables.starts[t.b];
  for (int i = t.begin; i < t.end; ++i, records += record_size(D)) {
    const int64_t at = ((first + i / a.R) * H + t.g * a.R + i % a.R) * D;
    const float sum = record_sum(records, D), by = record_max(records, D) == NOTHING ? 0.0f : 1.0f / sum;
    if (a.q.type == Type::float32) {
      float* o = static_cast<float*>(a.o) + at;
      for (int d = 0; d < D; ++d) o[d] = records[d] * by;
    } else {
      uint16_t* o = static_cast<uint16_t*>(a.o) + at;
      for (int d = 0; d < D; ++d) o[d] = float_to_bf16(records[d] * by);
    }
  }
}

// Fresh tokens before the first request and after the last are nobody's: 0.
static void clear_strays(const Attend& a) {
  const size_t token = size_t(a.tables.G) * a.R * a.kv.D * bytes(a.q.type);
  const int32_t begin = a.tables.starts[0], end = a.tables.starts[a.tables.B];
  memset(a.o, 0, begin * token);
  memset(static_cast<char*>(a.o) + end * token, 0, (a.T - end) * token);
}

void Work::make(const Attend& a, int threads) {
  plan.make(a, threads);
  watch.make(a, plan, threads);
  if (partial.size() < size_t(plan.partial_floats)) partial.resize(plan.partial_floats);
  if (tiles < plan.tiles.size()) {
    tiles = 2 * plan.tiles.size();
    done.reset(new std::atomic<int>[tiles]);
  }
  for (size_t i = 0; i < plan.tiles.size(); ++i) done[i].store(0, std::memory_order_relaxed);
}

static void do_job(const Attend& a, Work& work, const Job& job, int thread) {
  // On the stack, for memory fresh from the system costs more to touch than a short job takes.
  alignas(64) float scratch[SCRATCH], state[TILE_ROWS * MAX_RECORD], records[TILE_ROWS * MAX_RECORD];
  const Isa& inner = isa();
  const Tile& t = work.plan.tiles[job.tile];
  const int D = a.kv.D, spans = spans_of(a, t), mine = job.end - job.begin;
  const bool watched = work.watch.watches(job.tile);
  const Seen seen = watched ? work.watch.seen(a, work.plan, job.tile, thread) : Seen{};
  auto look = [&](int span, float* to) {
    if (inner.look(a, t, span, scratch, to, watched ? &seen : nullptr)) return true;
    for (int r = 0; watched && r < t.rows(); ++r) seen.tops[r * spans + span] = NOTHING;
    return false;
  };
  if (mine == spans) {
    clear(state, t.rows(), D);
    for (int span = 0; span < spans; ++span)
      if (look(span, records)) merge(state, records, t.rows(), D);
  } else {
    float* const parts = work.partial.data() + work.plan.records[job.tile];
    const int64_t size = int64_t(t.rows()) * record_size(D);
    for (int span = job.begin; span < job.end; ++span)
      if (!look(span, parts + span * size)) clear(parts + span * size, t.rows(), D);
    if ((work.done[job.tile] += mine) < spans) return;  // whoever comes last merges: no thread waits for another
    clear(state, t.rows(), D);
    for (int span = 0; span < spans; ++span) merge(state, parts + span * size, t.rows(), D);
  }
  finish(a, t, state);
  if (watched) work.watch.finish(a, work.plan, job.tile, seen);
}

void attend(const Attend& a, Work& work, Team::Member& me) {
  me.share(int(work.plan.jobs.size()), 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) do_job(a, work, work.plan.jobs[i], me.id);
  });
}

void attend(const Attend& a) {
  constexpr double WORTH_WAKING = 1 << 17;  // multiply-adds
  check(a);
  clear_strays(a);
  Work work;
  work.make(a, threads());
  Team::run(work.plan.work < WORTH_WAKING, [&](Team::Member& me) { attend(a, work, me); });
}

}  // namespace retain
