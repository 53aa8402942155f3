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

// The buffers of a tile, one behind the other.
static TableMasses buffers_at(char* weights, const AttentionArgs& args, const QueryTile& t) {
  float* maxima = reinterpret_cast<float*>(weights + weight_bytes(args, t));
  const int blocks = num_blocks(args, t), own_blocks = num_blocks(args.kv, args.tables, t);
  float* sums = maxima + t.num_rows() * blocks;
  return {MassBuffers{weights, maxima, sums, own_slots(args, t), blocks},
          MassBuffers{weights + own_weight_bytes(args, t), maxima + own_blocks, sums + own_blocks,
                      demoted_slots(args, t), blocks}};
}

constexpr int SPARE_BUFFERS = 2;  // for each thread

void MassAccumulator::build(const AttentionArgs& args, const AttentionPlan& plan, int threads) {
  is_scored_.clear();
  if (!args.scoring.weights) return;
  num_heads_ = args.tables.G;
  heads_.assign(args.tables.B * num_heads_, {-1, -1, false});
  buffer_offsets_.assign(plan.tiles.size(), 0);
  finished_.assign(plan.tiles.size(), nullptr);
  int64_t split_bytes = 0, thread_bytes = 0;
  for (size_t i = 0; i < plan.tiles.size(); ++i) {
    const QueryTile& tile = plan.tiles[i];
    is_scored_.push_back(is_request_scored(args, tile.b));
    if (!is_scored_.back()) continue;
    Head& head = heads_[tile.b * num_heads_ + tile.g];
    if (head.first_tile < 0) head.first_tile = head.next_tile = int(i);
    const int64_t size = weight_bytes(args, tile) + round_up(2 * tile.num_rows() * num_blocks(args, tile) * 4, 64);
    buffer_offsets_[i] = split_bytes;
    plan.is_split[i] ? split_bytes += size : thread_bytes = std::max(thread_bytes, size);
  }
  const int buffers = threads == 1 ? 1 : threads * (1 + SPARE_BUFFERS);
  if (int64_t(memory_.size()) < buffers * thread_bytes + split_bytes)
    memory_.resize(buffers * thread_bytes + split_bytes);
  thread_buffers_.clear(), spare_buffers_.clear();
  for (int i = 0; i < buffers; ++i)
    (i < threads ? thread_buffers_ : spare_buffers_).push_back(memory_.data() + i * thread_bytes);
  for (int64_t& offset : buffer_offsets_) offset += buffers * thread_bytes;
}

TableMasses MassAccumulator::buffers(const AttentionArgs& args, const AttentionPlan& plan, int tile, int thread) {
  char* memory = plan.is_split[tile] ? memory_.data() + buffer_offsets_[tile] : thread_buffers_[thread];
  return buffers_at(memory, args, plan.tiles[tile]);
}

// The score of a row's sink logit. It has no noise, but the mean of what scores get, so that constants cancel.
static float sink_score(const AttentionArgs& args, const QueryTile& t, int row, int token) {
  constexpr float MEAN_NOISE = 0.5772157f;
  const NoiseKind kind = NoiseKind(args.scoring.noise[t.b]);
  const bool noised = kind == NoiseKind::gumbel || kind == NoiseKind::gaussian;
  const float x = args.params.sink_logits[t.g * args.R + row % args.R] + (noised ? MEAN_NOISE : 0);
  return x / args.scoring.temperature[token];
}

// Replaces each row's maxima by factors: token weight / sum over all blocks, relative to the block's maximum.
static void normalize(const AttentionArgs& args, const QueryTile& t, const MassBuffers& mass) {
  for (int r = 0; r < t.num_rows(); ++r) {
    float *maxima = mass.maxima + r * mass.num_blocks, *sums = mass.sums + r * mass.num_blocks;
    float top = NEG_INF, sum = 0;
    for (int i = 0; i < mass.num_blocks; ++i) top = std::max(top, maxima[i]);
    for (int i = 0; i < mass.num_blocks; ++i) sum += maxima[i] == NEG_INF ? 0 : sums[i] * std::exp(maxima[i] - top);
    const int row = t.begin + r, token = args.tables.query_start_loc[t.b] + row / args.R;
    if (args.params.sink_logits && top != NEG_INF) sum += std::exp(sink_score(args, t, row, token) - top);
    const float weight = args.scoring.weights[token];
    for (int i = 0; i < mass.num_blocks; ++i)
      maxima[i] = maxima[i] == NEG_INF ? 0 : weight * std::exp(maxima[i] - top) / sum;
  }
}

void MassAccumulator::finish_tile(const AttentionArgs& args, const AttentionPlan& plan, int tile, int thread) {
  const QueryTile& t = plan.tiles[tile];
  const TableMasses masses = buffers(args, plan, tile, thread);
  normalize(args, t, masses[0]);  // its blocks are followed by those of the other table
  std::unique_lock<std::mutex> lock(mutex_);
  Head& head = heads_[t.b * num_heads_ + t.g];
  finished_[tile] = masses[0].weights;
  if (head.is_busy || head.next_tile != tile) {
    lock.unlock();
    if (!plan.is_split[tile]) take_spare_buffer(thread);
    return;
  }
  head.is_busy = true;
  const int end = int(plan.tiles.size());
  for (int i = tile; i < end && plan.tiles[i].b == t.b && finished_[i]; i = head.next_tile += num_heads_) {
    const TableMasses part = buffers_at(finished_[i], args, plan.tiles[i]);
    lock.unlock();
    const float decay = i == head.first_tile ? args.scoring.decay[t.b] : 1.0f;
    selected_isa().reduce_mass(args, plan.tiles[i], part[0], part[0].maxima, decay);
    if (args.has_demoted())
      selected_isa().reduce_mass(args.demoted(), plan.tiles[i], part[1], part[1].maxima, decay);
    lock.lock();
    if (i != tile && !plan.is_split[i]) spare_buffers_.push_back(finished_[i]);
  }
  head.is_busy = false;
}

// Gives a thread buffers in place of those that it left to a finished tile. Never waits for ever: a tile that others
// wait for has buffers, because jobs start in the order of a head's tiles. This needs that all tiles of a head are split
// or none is: jobs of split tiles start after all others. So it is, because a request's tokens and a head's pages decide.
void MassAccumulator::take_spare_buffer(int thread) {
  wait_until([&] {
    std::lock_guard<std::mutex> lock(mutex_);
    if (spare_buffers_.empty()) return false;
    thread_buffers_[thread] = spare_buffers_.back();
    spare_buffers_.pop_back();
    return true;
  });
}

}  // namespace retain
