// Updates masses. A head's tiles are summed in the order of the plan, so the result does not depend on which thread
// computed which tile.
#include <cmath>
#include <limits>

#include "kernels.h"

namespace retain {

static bool is_request_scored(const AttentionArgs& args, int b) {
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
  sum_offsets_.clear();
  if (!args.scoring.weights) return;
  num_heads_ = args.tables.G;
  std::vector<char> is_scored(args.tables.B);
  for (int b = 0; b < args.tables.B; ++b) is_scored[b] = is_request_scored(args, b);
  tiles_left_.reset(new std::atomic<int>[args.tables.B * num_heads_]());
  first_tile_.assign(args.tables.B * num_heads_, -1);
  next_tile_.assign(plan.tiles.size(), -1);
  buffer_offsets_.assign(plan.tiles.size(), 0);
  int64_t sums = 0, split_bytes = 0;
  thread_bytes_ = 0;
  for (size_t i = 0; i < plan.tiles.size(); ++i) {
    const QueryTile& tile = plan.tiles[i];
    sum_offsets_.push_back(is_scored[tile.b] ? sums : -1);
    if (!is_scored[tile.b]) continue;
    ++tiles_left_[tile.b * num_heads_ + tile.g];
    next_tile_[i] = first_tile_[tile.b * num_heads_ + tile.g];
    first_tile_[tile.b * num_heads_ + tile.g] = int(i);
    sums += args.kv.mass_columns * (own_slots(args, tile) + demoted_slots(args, tile));
    const int64_t size = weight_bytes(args, tile) + round_up(2 * tile.num_rows() * num_blocks(args, tile) * 4, 64);
    buffer_offsets_[i] = split_bytes;
    plan.is_split[i] ? split_bytes += size : thread_bytes_ = std::max(thread_bytes_, size);
  }
  if (int64_t(sums_.size()) < sums) sums_.resize(sums);
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

// Adds what all tiles of a head have summed to the masses of a table. Sums of tile k begin at first_sum(k).
template <class FirstSum>
static void add_sums(const AttentionArgs& args, const QueryTile& t, int first_tile, const std::vector<int>& next_tile,
                     const FirstSum& first_sum) {
  const int S = args.kv.S, columns = args.kv.mass_columns;
  const int64_t slots = own_slots(args, t);
  const float decay = args.scoring.decay[t.b];
  for (int i = 0; i < args.tables.num_pages(t.b, t.g); ++i) {
    float* slot_mass = args.kv.mass_page(args.tables.page_table(t.b, t.g)[i]);
    for (int s = 0; s < columns * S; ++s) slot_mass[s] *= decay;
    for (int k = first_tile; k >= 0; k = next_tile[k]) {
      const float* sums = first_sum(k);
      for (int c = 0; c < columns; ++c)
        for (int s = 0; s < S; ++s) slot_mass[c * S + s] += sums[c * slots + int64_t(i) * S + s];
    }
  }
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
  const IsaKernels& isa = selected_isa();
  const AttentionArgs demoted = args.demoted();
  const int first_tile = first_tile_[t.b * num_heads_ + t.g];
  if (next_tile_[first_tile] < 0) {  // the head's only tile
    isa.reduce_mass(args, t, masses[0], masses[0].maxima, nullptr);
    if (args.has_demoted()) isa.reduce_mass(demoted, t, masses[1], masses[1].maxima, nullptr);
    return;
  }
  float* const own_sums = sums_.data();
  float* const demoted_sums = own_sums + args.kv.mass_columns * own_slots(args, t);
  isa.reduce_mass(args, t, masses[0], masses[0].maxima, own_sums + sum_offsets_[tile]);
  if (args.has_demoted()) isa.reduce_mass(demoted, t, masses[1], masses[1].maxima, demoted_sums + sum_offsets_[tile]);
  if (--tiles_left_[t.b * num_heads_ + t.g] > 0) return;

  add_sums(args, t, first_tile, next_tile_, [&](int k) { return own_sums + sum_offsets_[k]; });
  if (args.has_demoted())
    add_sums(demoted, t, first_tile, next_tile_, [&](int k) { return demoted_sums + sum_offsets_[k]; });
}

}  // namespace retain
