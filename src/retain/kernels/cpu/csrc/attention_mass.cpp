// Updates masses. A head's tiles are added one after the other, in the order of their queries, and so are the rows of a
// tile. So the bits of a mass depend neither on the threads, nor on how the queries are divided into steps.
#include <cmath>
#include <limits>

#include "kernels.h"

namespace retain {

bool is_request_scored(const AttentionArgs& args, int b) {
  const AttentionScoring& scoring = args.scoring;
  if (!scoring.weights || args.tables.window_of(b) != std::numeric_limits<int32_t>::max()) return false;
  const int32_t* start = args.tables.query_start_loc;
  bool any = scoring.decay[b] != 1.0f;
  for (int t = start[b]; t < start[b + 1] && !any; ++t) any = scoring.weights[t] != 0;
  return any;
}

static int64_t num_slots(const Pool& kv, const PageTables& tables, const QueryTile& tile) {
  return int64_t(tables.num_pages(tile.b, tile.g)) * kv.S;
}

static int64_t own_slots(const AttentionArgs& args, const QueryTile& tile) {
  return num_slots(args.kv, args.tables, tile);
}

static int64_t demoted_slots(const AttentionArgs& args, const QueryTile& tile) {
  return args.has_demoted() ? num_slots(args.demoted_kv, args.demoted_tables, tile) : 0;
}

// Bytes of the weights of the slots that are not demoted.
static int64_t own_weight_bytes(const AttentionArgs& args, const QueryTile& tile) {
  return round_up(tile.num_rows() * own_slots(args, tile) * (args.kv.dtype == DType::float32 ? 4 : 2), 64);
}

static int64_t weight_bytes(const AttentionArgs& args, const QueryTile& tile) {
  return own_weight_bytes(args, tile) + round_up(tile.num_rows() * demoted_slots(args, tile) * 2, 64);
}

void MassAccumulator::build(const AttentionArgs& args, const AttentionPlan& plan, int threads) {
  ordinals_.clear();
  if (!args.scoring.weights) return;
  num_heads_ = args.tables.G;
  std::vector<char> is_scored(args.tables.B);
  for (int b = 0; b < args.tables.B; ++b) is_scored[b] = is_request_scored(args, b);
  tiles_done_.reset(new std::atomic<int>[args.tables.B * num_heads_]());
  std::vector<int> num_tiles(args.tables.B * num_heads_);
  buffer_offsets_.assign(plan.tiles.size(), 0);
  int64_t split_bytes = 0;
  thread_bytes_ = 0;
  for (size_t i = 0; i < plan.tiles.size(); ++i) {
    const QueryTile& tile = plan.tiles[i];
    ordinals_.push_back(is_scored[tile.b] ? num_tiles[tile.b * num_heads_ + tile.g]++ : -1);
    if (!is_scored[tile.b]) continue;
    const int64_t size = weight_bytes(args, tile) + round_up(2 * tile.num_rows() * num_blocks(args, tile) * 4, 64);
    buffer_offsets_[i] = split_bytes;
    plan.is_split[i] ? split_bytes += size : thread_bytes_ = std::max(thread_bytes_, size);
  }
  if (int64_t(memory_.size()) < threads * thread_bytes_ + split_bytes)
    memory_.resize(threads * thread_bytes_ + split_bytes);
  for (int64_t& offset : buffer_offsets_) offset += threads * thread_bytes_;
}

TableMasses MassAccumulator::buffers(const AttentionArgs& args, const AttentionPlan& plan, int tile, int thread) {
  const QueryTile& t = plan.tiles[tile];
  char* weights = memory_.data() + (plan.is_split[tile] ? buffer_offsets_[tile] : thread * thread_bytes_);
  float* maxima = reinterpret_cast<float*>(weights + weight_bytes(args, t));
  const int blocks = num_blocks(args, t), own_blocks = num_blocks(args.kv, args.tables, t);
  float* sums = maxima + t.num_rows() * blocks;
  return {MassBuffers{weights, maxima, sums, own_slots(args, t), blocks},
          MassBuffers{weights + own_weight_bytes(args, t), maxima + own_blocks, sums + own_blocks,
                      demoted_slots(args, t), blocks}};
}

void MassAccumulator::finish_tile(const AttentionArgs& args, const AttentionPlan& plan, int tile,
                                  const TableMasses& masses) {
  const QueryTile& t = plan.tiles[tile];
  const MassBuffers& mass = masses[0];  // its blocks are followed by those of the other table
  // Replace each row's maxima by factors: token weight / sum over all blocks, relative to the block's maximum.
  for (int r = 0; r < t.num_rows(); ++r) {
    float *maxima = mass.maxima + r * mass.num_blocks, *sums = mass.sums + r * mass.num_blocks;
    float top = NEG_INF, sum = 0;
    for (int i = 0; i < mass.num_blocks; ++i) top = std::max(top, maxima[i]);
    for (int i = 0; i < mass.num_blocks; ++i) sum += maxima[i] == NEG_INF ? 0 : sums[i] * std::exp(maxima[i] - top);
    const float weight = args.scoring.weights[args.tables.query_start_loc[t.b] + (t.begin + r) / args.R];
    for (int i = 0; i < mass.num_blocks; ++i)
      maxima[i] = maxima[i] == NEG_INF ? 0 : weight * std::exp(maxima[i] - top) / sum;
  }
  // Jobs start in the order of a head's tiles, so another thread works on the tile before, if it is not done.
  std::atomic<int>& done = tiles_done_[t.b * num_heads_ + t.g];
  const int ordinal = ordinals_[tile];
  wait_until([&] { return done.load(std::memory_order_acquire) == ordinal; });
  const float decay = ordinal == 0 ? args.scoring.decay[t.b] : 1.0f;
  const IsaKernels& isa = selected_isa();
  isa.reduce_mass(args, t, masses[0], masses[0].maxima, decay);
  if (args.has_demoted()) isa.reduce_mass(args.demoted(), t, masses[1], masses[1].maxima, decay);
  done.store(ordinal + 1, std::memory_order_release);
}

}  // namespace retain
