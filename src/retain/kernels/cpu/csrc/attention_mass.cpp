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

static int64_t num_slots(const AttentionArgs& args, const QueryTile& tile) {
  return int64_t(args.tables.num_pages(tile.b, tile.g)) * args.kv.S;
}

static int64_t weight_bytes(const AttentionArgs& args, const QueryTile& tile) {
  return round_up(tile.num_rows() * num_slots(args, tile) * (args.kv.dtype == DType::float32 ? 4 : 2), 64);
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
    sums += args.kv.mass_columns * num_slots(args, tile);
    const int64_t size = weight_bytes(args, tile) + round_up(2 * tile.num_rows() * num_blocks(args, tile) * 4, 64);
    buffer_offsets_[i] = split_bytes;
    plan.is_split[i] ? split_bytes += size : thread_bytes_ = std::max(thread_bytes_, size);
  }
  if (int64_t(sums_.size()) < sums) sums_.resize(sums);
  if (int64_t(memory_.size()) < threads * thread_bytes_ + split_bytes)
    memory_.resize(threads * thread_bytes_ + split_bytes);
  for (int64_t& offset : buffer_offsets_) offset += threads * thread_bytes_;
}

MassBuffers MassAccumulator::buffers(const AttentionArgs& args, const AttentionPlan& plan, int tile, int thread) {
  const QueryTile& t = plan.tiles[tile];
  char* weights = memory_.data() + (plan.is_split[tile] ? buffer_offsets_[tile] : thread * thread_bytes_);
  float* maxima = reinterpret_cast<float*>(weights + weight_bytes(args, t));
  const int blocks = num_blocks(args, t);
  return {weights, maxima, maxima + t.num_rows() * blocks, num_slots(args, t), blocks};
}

void MassAccumulator::finish_tile(const AttentionArgs& args, const AttentionPlan& plan, int tile,
                                  const MassBuffers& mass) {
  const QueryTile& t = plan.tiles[tile];
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
  if (next_tile_[first_tile_[t.b * num_heads_ + t.g]] < 0)  // the head's only tile
    return selected_isa().reduce_mass(args, t, mass, mass.maxima, nullptr);
  selected_isa().reduce_mass(args, t, mass, mass.maxima, sums_.data() + sum_offsets_[tile]);
  if (--tiles_left_[t.b * num_heads_ + t.g] > 0) return;

  const int S = args.kv.S, columns = args.kv.mass_columns;
  const float decay = args.scoring.decay[t.b];
  for (int i = 0; i < args.tables.num_pages(t.b, t.g); ++i) {
    float* slot_mass = args.kv.mass_page(args.tables.page_table(t.b, t.g)[i]);
    for (int s = 0; s < columns * S; ++s) slot_mass[s] *= decay;
    for (int k = first_tile_[t.b * num_heads_ + t.g]; k >= 0; k = next_tile_[k]) {
      const float* sums = sums_.data() + sum_offsets_[k];
      for (int c = 0; c < columns; ++c)
        for (int s = 0; s < S; ++s) slot_mass[c * S + s] += sums[c * mass.num_slots + int64_t(i) * S + s];
    }
  }
}

}  // namespace retain
