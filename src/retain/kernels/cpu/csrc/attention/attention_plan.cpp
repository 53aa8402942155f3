// Checks the arguments of the `attend` kernel and splits its work into jobs.
#include <algorithm>
#include <stdexcept>

#include "kernels.h"

namespace retain {

// A request with few fresh tokens has too few tiles to keep all threads busy. So the plan splits the blocks of its
// tiles among jobs and merges the partial results later. Several jobs for each thread balance the load. Jobs are as
// long as that allows, because a job can prefetch only its own next page. With many fresh tokens a job is a whole tile.
// The results are the same either way (see ACC_BLOCK).
constexpr int MAX_SPLIT_TOKENS = 64;
constexpr int JOBS_PER_THREAD = 4;

// Raises std::invalid_argument if a kernel would read out of bounds. Serial, because it costs far less than the work.
void check(const AttentionArgs& args) {
  const PageTables& t = args.tables;
  if (args.has_demoted()) check(args.demoted());
  int32_t end = t.query_start_loc[0];
  if (end < 0) throw std::invalid_argument("tables.query_start_loc must not be negative");
  for (int b = 0; b < t.B; ++b) {
    if (t.query_start_loc[b + 1] < end) throw std::invalid_argument("tables.query_start_loc must not descend");
    end = t.query_start_loc[b + 1];
    if (t.rows[b] < 0 || t.rows[b] >= t.num_rows)
      throw std::invalid_argument("tables.rows names a row outside tables.pages");
    for (int g = 0; g < t.G; ++g) {
      const int32_t n = t.num_pages(b, g);
      if (n < 0 || n > t.max_pages) throw std::invalid_argument("tables.counts exceeds the width of tables.pages");
      uint32_t highest = 0;
      for (int i = 0; i < n; ++i) highest = std::max(highest, uint32_t(t.page_table(b, g)[i]));
      if (highest >= args.kv.num_pages && n > 0)
        throw std::invalid_argument("tables.pages names a page outside the pool");
    }
  }
  if (end > args.T) throw std::invalid_argument("tables.query_start_loc ends beyond the fresh tokens");
  for (int b = 0; b < t.B; ++b) {
    if (t.first_look(b) == t.num_fresh(b)) continue;
    if (!args.kv.sketches) throw std::invalid_argument("tables.looks: the pool has no sketches");
    if (is_request_scored(args, b)) throw std::invalid_argument("tables.looks: a request that looks adds no masses");
    for (int i = t.query_start_loc[b] + t.first_look(b); i < t.query_start_loc[b + 1]; ++i)
      if (t.looks[i] <= 0) throw std::invalid_argument("tables.looks: tokens behind one that looks see all slots");
  }
}

void AttentionPlan::build(const AttentionArgs& args, int threads) {
  const PageTables& tables = args.tables;
  const int tile_rows = selected_isa().max_tile_rows;
  tiles.clear(), is_split.clear(), partial_offsets.clear(), jobs.clear(), split_jobs.clear(), shared_looks.clear();
  num_partial_floats = 0, multiply_adds = 0;
  int64_t split_blocks = 0;  // blocks of all tiles that may be split
  for (int b = tables.B - 1; b >= 0; --b) {
    const int first_look = tables.first_look(b);
    for (int token = tables.num_fresh(b) - 1; token >= first_look; --token)
      for (int begin = token * args.R; begin < (token + 1) * args.R; begin += tile_rows)
        for (int g = 0; g < tables.G; ++g) {
          const int end = std::min(begin + tile_rows, (token + 1) * args.R);
          tiles.push_back({b, g, begin, end, tables.looks[tables.query_start_loc[b] + token]});
          multiply_adds += double(args.R) * tables.num_pages(b, g) * args.kv.S * args.kv.k_dim;
        }
    const int rows = first_look * args.R, n = (rows + tile_rows - 1) / tile_rows;
    const bool in_order = is_request_scored(args, b);  // see MassAccumulator
    for (int i = 0; i < n; ++i) {
      const int end = rows - (in_order ? n - 1 - i : i) * tile_rows;  // else last rows first: they take longest
      for (int g = 0; g < tables.G; ++g) {
        tiles.push_back({b, g, std::max(0, end - tile_rows), end});
        const QueryTile& tile = tiles.back();
        if (tables.num_fresh(b) <= MAX_SPLIT_TOKENS) split_blocks += num_blocks(args, tile);
        multiply_adds += double(tile.num_rows()) * tables.num_pages(b, g) * args.kv.S * (args.kv.k_dim + args.kv.v_dim);
      }
    }
  }

  const int job_blocks = int(std::max<int64_t>(1, split_blocks / (JOBS_PER_THREAD * threads)));
  const int looks = std::count_if(tiles.begin(), tiles.end(), [](const QueryTile& t) { return t.num_looked > 0; });
  const bool share_looks = 0 < looks && looks < threads;  // else each is one thread's, whose cache has its weights
  const int look_jobs = share_looks ? JOBS_PER_THREAD * threads / looks : 1;
  for (int i = 0; i < int(tiles.size()); ++i) {
    QueryTile& tile = tiles[i];
    partial_offsets.push_back(num_partial_floats);
    if (tile.num_looked) {  // how many blocks there are depends on what is chosen: at most twice those of the table
      is_split.push_back(share_looks);
      for (int k = 0; k < look_jobs; ++k) jobs.push_back({i, k, look_jobs});
      if (!share_looks) continue;
      tile.look = int(shared_looks.size());
      shared_looks.push_back(i);
      num_partial_floats += 2 * int64_t(num_blocks(args, tile)) * tile.num_rows() * partial_size(args.kv.v_dim);
      continue;
    }
    const int blocks = num_blocks(args, tile);
    is_split.push_back(tables.num_fresh(tile.b) <= MAX_SPLIT_TOKENS && blocks > job_blocks);
    if (!is_split.back()) {
      jobs.push_back({i, 0, blocks});
      continue;
    }
    for (int first = 0; first < blocks; first += job_blocks)
      split_jobs.push_back({i, first, std::min(blocks, first + job_blocks)});
    num_partial_floats += int64_t(blocks) * tile.num_rows() * partial_size(args.kv.v_dim);
  }
  jobs.insert(jobs.end(), split_jobs.begin(), split_jobs.end());
}

}  // namespace retain
