// The `attend` kernel: runs the jobs of the plan, merges partial results block by block and divides by the softmax sum.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace retain {

static void clear(float* partials, int rows, int D) {
  for (int r = 0; r < rows; ++r) {
    float* x = partials + r * partial_size(D);
    std::fill_n(x, D, 0.0f);
    partial_max(x, D) = NEG_INF;
    partial_sum(x, D) = 0.0f;
  }
}

// The sum of a row's softmax: that of its slots, and the sink logit of its query head.
static float softmax_sum(const AttentionArgs& args, const float* partial, int head) {
  const float sum = partial_sum(partial, args.kv.v_dim);
  if (!args.params.sink_logits) return sum;
  return sum + std::exp(args.params.sink_logits[head] - partial_max(partial, args.kv.v_dim));
}

// Divides by the softmax sum and stores the rows. A row without a visible slot is 0.
static void store_output(const AttentionArgs& args, const QueryTile& tile, float* partials) {
  const int D = args.kv.v_dim;
  const int64_t H = int64_t(args.tables.G) * args.R, first = args.tables.query_start_loc[tile.b];
  for (int i = tile.begin; i < tile.end; ++i, partials += partial_size(D)) {
    const int head = tile.g * args.R + i % args.R;
    const int64_t offset = ((first + i / args.R) * H + head) * D;
    const bool sees_none = partial_max(partials, D) == NEG_INF;
    const float factor = sees_none ? 0.0f : 1.0f / softmax_sum(args, partials, head);
    if (args.q.dtype == DType::float32) {
      float* o = static_cast<float*>(args.o) + offset;
      for (int d = 0; d < D; ++d) o[d] = partials[d] * factor;
    } else {
      uint16_t* o = static_cast<uint16_t*>(args.o) + offset;
      for (int d = 0; d < D; ++d) o[d] = float_to_bf16(partials[d] * factor);
    }
  }
}

// Sets the output to 0 for fresh tokens before the first request and after the last.
static void clear_padding(const AttentionArgs& args) {
  const size_t token = size_t(args.tables.G) * args.R * args.kv.v_dim * element_size(args.q.dtype);
  const int32_t begin = args.tables.query_start_loc[0], end = args.tables.query_start_loc[args.tables.B];
  memset(args.o, 0, begin * token);
  memset(static_cast<char*>(args.o) + end * token, 0, (args.T - end) * token);
}

void AttentionWorkspace::build(const AttentionArgs& args, int threads) {
  plan.build(args, threads);
  mass.build(args, plan, threads);
  gathered.resize(threads), transposed_keys.resize(threads);
  looks.resize(threads);  // threads share fewer looks than they are
  for (size_t i = 0; i < plan.shared_looks.size(); ++i) looks[i].begin(args, plan.tiles[plan.shared_looks[i]]);
  if (partials.size() < size_t(plan.num_partial_floats)) partials.resize(plan.num_partial_floats);
  if (max_tiles < plan.tiles.size()) {
    max_tiles = 2 * plan.tiles.size();
    blocks_done.reset(new std::atomic<int>[max_tiles]);
  }
  for (size_t i = 0; i < plan.tiles.size(); ++i) blocks_done[i].store(0, std::memory_order_relaxed);
}

// Chooses the slots of the looks that threads share.
static void choose_together(const AttentionArgs& args, AttentionWorkspace& work, ThreadTeam::Member& member) {
  const std::vector<int>& tiles = work.plan.shared_looks;
  int num_parts = 0;  // of the longest look
  for (size_t i = 0; i < tiles.size(); ++i) num_parts = std::max(num_parts, work.looks[i].num_parts());
  const int n = num_parts * int(tiles.size());
  member.parallel_for(n, std::max(1, n / (2 * member.size)), [&](int begin, int end) {
    alignas(64) float scratch[SCRATCH_FLOATS];
    for (int i = begin; i < end; ++i) {
      LookedSlots& look = work.looks[i / num_parts];
      if (i % num_parts < look.num_parts())
        look.weigh(args, work.plan.tiles[tiles[i / num_parts]], i % num_parts, scratch);
    }
  });
  member.barrier();
  member.parallel_for(int(tiles.size()), 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) work.looks[i].choose(args, work.plan.tiles[tiles[i]]);
  });
  member.barrier();
}

static void run_job(const AttentionArgs& whole, AttentionWorkspace& work, const AttentionJob& job, int thread) {
  // On the stack: the first touch of fresh heap memory costs more than a short job takes.
  alignas(64) float scratch[SCRATCH_FLOATS], total[MAX_TILE_ROWS * MAX_PARTIAL], partials[MAX_TILE_ROWS * MAX_PARTIAL];
  const IsaKernels& isa = selected_isa();
  const QueryTile& tile = work.plan.tiles[job.tile];
  AttentionArgs args = whole;
  if (args.kv.has_keys_by_slot() && !tile.num_looked) {
    AlignedVector<char>& memory = work.transposed_keys[thread];
    grow(memory, pages_per_block(args.kv) * args.kv.key_bytes() + BEHIND_PAGES);
    args.transposed_keys = memory.data();
  }
  const int D = args.kv.v_dim, own_blocks = num_blocks(args.kv, args.tables, tile);
  LookedSlots& look = work.looks[tile.look >= 0 ? tile.look : thread];
  if (tile.num_looked && tile.look < 0) {
    look.begin(args, tile);
    for (int i = 0; i < look.num_parts(); ++i) look.weigh(args, tile, i, scratch);
    look.choose(args, tile);
  }
  const int blocks = tile.num_looked ? look.num_blocks(args.kv) : num_blocks(args, tile);
  const int first = tile.num_looked ? blocks * job.begin / job.end : job.begin;
  const int last = tile.num_looked ? blocks * (job.begin + 1) / job.end : job.end;
  const AttentionArgs demoted = args.demoted();
  const bool is_scored = work.mass.is_scored(job.tile);
  const TableMasses mass = is_scored ? work.mass.buffers(args, work.plan, job.tile, thread) : TableMasses{};
  int has_queries = -1;  // whether those in `scratch` are for demoted slots
  auto attend_block = [&](int block, float* to) {
    const bool is_demoted = !tile.num_looked && block >= own_blocks;
    const MassBuffers& part = mass[is_demoted];
    if (has_queries != is_demoted) isa.gather_queries(is_demoted ? demoted : args, tile, scratch);
    has_queries = is_demoted;
    if (tile.num_looked) return look.attend(args, tile, block, work.gathered[thread], scratch, to);
    if (is_demoted) block -= own_blocks;
    if (isa.attend_tile(is_demoted ? demoted : args, tile, block, scratch, to, is_scored ? &part : nullptr)) return true;
    for (int r = 0; is_scored && r < tile.num_rows(); ++r) part.maxima[r * blocks + block] = NEG_INF;
    return false;
  };
  if (first == last && (blocks || job.begin)) {  // a look with fewer blocks than shares
    return;
  } else if (last - first == blocks) {
    clear(total, tile.num_rows(), D);
    for (int block = 0; block < blocks; ++block)
      if (attend_block(block, partials)) isa.merge_partials(total, partials, tile.num_rows(), D);
  } else {
    float* const block_partials = work.partials.data() + work.plan.partial_offsets[job.tile];
    const int64_t size = int64_t(tile.num_rows()) * partial_size(D);
    for (int block = first; block < last; ++block)
      if (!attend_block(block, block_partials + block * size)) clear(block_partials + block * size, tile.num_rows(), D);
    // The job that finishes last merges, so no thread waits for another.
    if ((work.blocks_done[job.tile] += last - first) < blocks) return;
    clear(total, tile.num_rows(), D);
    for (int block = 0; block < blocks; ++block)
      isa.merge_partials(total, block_partials + block * size, tile.num_rows(), D);
  }
  store_output(args, tile, total);
  if (is_scored) work.mass.finish_tile(args, work.plan, job.tile, thread);
}

void attend(const AttentionArgs& args, AttentionWorkspace& work, ThreadTeam::Member& member) {
  if (!work.plan.shared_looks.empty()) choose_together(args, work, member);
  member.parallel_for(int(work.plan.jobs.size()), 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) run_job(args, work, work.plan.jobs[i], member.id);
  });
}

void attend(const AttentionArgs& args) {
  constexpr double MIN_PARALLEL_MULTIPLY_ADDS = 1 << 17;
  check(args);
  clear_padding(args);
  AttentionWorkspace work;
  work.build(args, max_threads());
  ThreadTeam::run(work.plan.multiply_adds < MIN_PARALLEL_MULTIPLY_ADDS,
                  [&](ThreadTeam::Member& member) { attend(args, work, member); });
}

}  // namespace retain
