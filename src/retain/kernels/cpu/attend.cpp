// attend: jobs over the cores, records merged span by span, sums divided.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels.h"

namespace retain {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();

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

static int threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

void attend(const Attend& a) {
  check(a);
  clear_strays(a);
  const Plan p = plan(a, threads());
  const Isa& inner = isa();
  const int D = a.kv.D, n_jobs = int(p.jobs.size());
  const std::unique_ptr<float[]> partial(new float[p.partial_floats]);
  const std::unique_ptr<std::atomic<int>[]> done(new std::atomic<int>[p.tiles.size()]());  // spans, of each tile

#pragma omp parallel if (!p.alone)
  {
    // On the stack, for memory fresh from the system costs more to touch than a short job takes.
    alignas(64) float scratch[SCRATCH], state[TILE_ROWS * MAX_RECORD], records[TILE_ROWS * MAX_RECORD];

#pragma omp for schedule(dynamic) nowait
    for (int i = 0; i < n_jobs; ++i) {
      const Job& job = p.jobs[i];
      const Tile& t = p.tiles[job.tile];
      const int spans = spans_of(a, t), mine = job.end - job.begin;
      if (mine == spans) {
        clear(state, t.rows(), D);
        for (int span = 0; span < spans; ++span)
          if (inner.look(a, t, span, scratch, records)) merge(state, records, t.rows(), D);
      } else {
        float* const parts = partial.get() + p.records[job.tile];
        const int64_t size = int64_t(t.rows()) * record_size(D);
        for (int span = job.begin; span < job.end; ++span)
          if (!inner.look(a, t, span, scratch, parts + span * size)) clear(parts + span * size, t.rows(), D);
        if ((done[job.tile] += mine) < spans) continue;  // whoever comes last merges: no thread waits for another
        clear(state, t.rows(), D);
        for (int span = 0; span < spans; ++span) merge(state, parts + span * size, t.rows(), D);
      }
      finish(a, t, state);
    }
  }
}

}  // namespace retain
