// Short convolutions and linear attention: checks, and the work of each thread. state_kernels.cpp computes.
#include "attention/layer_states.h"

#include <stdexcept>

#include "kernels.h"

namespace retain {

// ---- checks ---------------------------------------------------------------------------------------------------------

// Raises std::invalid_argument unless a cache has `heads` of float32 slots of these sizes, and names what it has.
static void check(const SlotCache& cache, int T, int heads, int k_dim, int v_dim) {
  if (cache.kv.dtype != DType::float32) throw std::invalid_argument("states need slots of float32");
  if (cache.tables.G != heads || cache.kv.k_dim != k_dim || cache.kv.v_dim != v_dim)
    throw std::invalid_argument("the slots of the step have other sizes than the program's");
  AttentionArgs tables = {};
  tables.kv = cache.kv, tables.tables = cache.tables, tables.T = T;
  check(tables);
  check(WriteArgs{cache.kv, {}, {}, cache.slots, cache.slot_head_stride, cache.slot_token_stride, nullptr, T, heads});
}

static void check_positions(const PageTables& tables, const int32_t* pos) {
  for (int b = 0; b < tables.B; ++b)
    for (int t = tables.query_start_loc[b]; t < tables.query_start_loc[b + 1]; ++t)
      if (pos[t] < 0 || (t > tables.query_start_loc[b] && pos[t] != pos[t - 1] + 1))
        throw std::invalid_argument("layers with states need positions that ascend by 1");
}

void check(const ConvolutionArgs& args, int T) {
  const Pool& kv = args.cache.kv;
  const int heads = args.convolution.channels / (kv.k_dim + kv.v_dim);
  if (heads * (kv.k_dim + kv.v_dim) != args.convolution.channels)
    throw std::invalid_argument("the slots of the step have other sizes than the program's");
  check(args.cache, T, heads, kv.k_dim, kv.v_dim);
  check_positions(args.cache.tables, args.pos);
}

void check(const LinearAttentionArgs& args, int T) {
  const LinearAttention& p = args.params;
  check(args.tokens, T, p.num_value_heads, p.k_dim + 8, p.v_dim);
  check(args.states, T, p.num_value_heads * args.num_parts(), p.v_dim, p.v_dim);
  check_positions(args.tokens.tables, args.pos);
}

// ---- threads --------------------------------------------------------------------------------------------------------

// Finds the places in the table of request b that have its W - 1 inputs before `position`; -1 where there is none.
static void find_inputs(const SlotCache& cache, int b, int32_t position, int num_before, int32_t* found) {
  const int S = cache.kv.S;
  const int32_t* const pages = cache.tables.page_table(b, 0);
  std::fill_n(found, num_before, -1);
  for (int i = cache.tables.num_pages(b, 0) - 1; i >= 0; --i)
    for (int place = S - 1; place >= 0; --place) {
      const int32_t pos = cache.kv.pos[int64_t(pages[i]) * S + place];
      if (pos >= 0 && pos < position && position - pos <= num_before)
        found[num_before - (position - pos)] = i * S + place;
    }
}

void convolve(ConvolutionArgs args, StateWorkspace& work, ThreadTeam::Member& member) {
  const PageTables& tables = args.cache.tables;
  const int num_before = args.convolution.window - 1;
  if (member.id == 0) {
    work.found.resize(size_t(tables.B) * num_before);
    for (int b = 0; b < tables.B; ++b)
      if (tables.num_fresh(b))
        find_inputs(args.cache, b, args.pos[tables.query_start_loc[b]], num_before, &work.found[b * num_before]);
  }
  member.barrier();
  args.found = work.found.data();
  const int blocks = tables.G * (args.blocks_of_key() + args.blocks_of_value());
  member.parallel_for(blocks, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) selected_isa().convolve(args, i);
  });
}

void attend_linearly(const LinearAttentionArgs& args, StateWorkspace& work, ThreadTeam::Member& member) {
  const int64_t size = linear_attention_scratch(args);
  if (member.id == 0 && int64_t(work.scratch.size()) < size * member.size) work.scratch.resize(size * member.size);
  member.barrier();
  const int heads = args.params.num_value_heads;
  member.parallel_for(args.tokens.tables.B * heads, 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i)
      selected_isa().attend_linearly(args, i / heads, i % heads, work.scratch.data() + member.id * size);
  });
}

}  // namespace retain
