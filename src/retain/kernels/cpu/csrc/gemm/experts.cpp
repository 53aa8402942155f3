// Mixtures of experts. Choices are sorted by expert, so that a step reads the weights of each chosen expert once. The
// rows of an expert are multiplied as in packed_gemm.h, and a token adds its experts in the order of their scores: its
// bits depend on no other token.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace retain {

// ---- the router -------------------------------------------------------------------------------------------------

// Returns the scores as probabilities, in `p` [n].
static void to_probabilities(const Router& router, const float* scores, float* p) {
  const int n = router.num_experts;
  if (router.is_sigmoid) {
    for (int e = 0; e < n; ++e) p[e] = 1 / (1 + std::exp(-scores[e]));
    return;
  }
  const float maximum = *std::max_element(scores, scores + n);
  float total = 0;
  for (int e = 0; e < n; ++e) total += p[e] = std::exp(scores[e] - maximum);
  for (int e = 0; e < n; ++e) p[e] /= total;
}

// Writes the places of the k largest numbers of `x` [n] to `best`, of equal ones the first, and makes them -inf.
static void take_largest(float* x, int n, int k, int* best) {
  for (int i = 0; i < k; ++i) {
    best[i] = int(std::max_element(x, x + n) - x);
    x[best[i]] = -INFINITY;
  }
}

// Makes the scores of all but the best groups -inf.
static void keep_best_groups(const Router& router, float* x) {
  const int size = router.num_experts / router.num_groups;
  std::vector<float> sums(router.num_groups);
  for (int g = 0; g < router.num_groups; ++g) {
    float largest[2] = {-INFINITY, -INFINITY};
    for (int i = 0; i < size; ++i) {
      const float y = x[g * size + i];
      if (y > largest[0]) largest[1] = largest[0], largest[0] = y;
      else if (y > largest[1]) largest[1] = y;
    }
    sums[g] = router.group_best > 1 && size > 1 ? largest[0] + largest[1] : largest[0];
  }
  std::vector<int> best(router.top_groups);
  take_largest(sums.data(), router.num_groups, router.top_groups, best.data());
  for (int g = 0; g < router.num_groups; ++g)
    if (std::find(best.begin(), best.end(), g) == best.end())
      std::fill(x + g * size, x + (g + 1) * size, -INFINITY);
}

// Writes the experts of a token, best first, and their weights.
static void route(const Router& router, const float* scores, int* experts, float* weights) {
  const int n = router.num_experts, k = router.top_k;
  std::vector<float> p(n), chosen_by(n);
  to_probabilities(router, scores, p.data());
  for (int e = 0; e < n; ++e) chosen_by[e] = router.bias ? p[e] + router.bias[e] : p[e];
  if (router.num_groups > 1) keep_best_groups(router, chosen_by.data());
  take_largest(chosen_by.data(), n, k, experts);
  float total = 0;
  for (int i = 0; i < k; ++i) total += weights[i] = p[experts[i]];
  const float factor = router.normalize ? router.scale / (total + router.sum_epsilon) : router.scale;
  for (int i = 0; i < k; ++i) weights[i] *= factor;
  for (int i = 0; router.expert_scale && i < k; ++i) weights[i] *= router.expert_scale[experts[i]];
}

// Sorts the choices of all tokens by expert.
static void sort_choices(const Experts& x, int num_choices, ExpertsWorkspace& w) {
  std::vector<int> begin(x.count + 1);
  const auto is_here = [&](int c) { return w.experts[c] >= x.first && w.experts[c] < x.first + x.count; };
  for (int c = 0; c < num_choices; ++c)
    if (is_here(c)) ++begin[w.experts[c] - x.first + 1];
  w.active.clear(), w.row_begin.clear();
  for (int e = 0; e < x.count; ++e) {
    if (begin[e + 1]) w.active.push_back(e), w.row_begin.push_back(begin[e]);
    begin[e + 1] += begin[e];
  }
  w.row_begin.push_back(begin[x.count]);
  for (int c = 0; c < num_choices; ++c) w.rows[c] = is_here(c) ? begin[w.experts[c] - x.first]++ : -1;
}

// ---- the experts ------------------------------------------------------------------------------------------------

// The product of every row with the matrix of its expert; `n` outputs of each.
static void grouped_gemm(const PackedWeight& all, int n, const float* bias, const char* prepared, float* y,
                         const ExpertsWorkspace& w, ThreadTeam::Member& member) {
  const IsaKernels& isa = selected_isa();
  const int tiles = n / TILE_OUT;
  member.parallel_for(int(w.active.size()) * tiles, [&](int begin, int end) {
    for (int next; begin < end; begin = next) {
      const int i = begin / tiles, e = w.active[i], row = w.row_begin[i];
      next = std::min(end, (i + 1) * tiles);
      const PackedWeight own = {all.data + all.tile_bytes() * tiles * e, n, all.in, all.format};
      const OutputView out = {y + int64_t(row) * n, n, bias ? bias + int64_t(e) * n : nullptr, false};
      isa.packed_gemm(own, begin - i * tiles, next - i * tiles, prepared + row * isa.activation_bytes(all),
                      w.row_begin[i + 1] - row, out);
    }
  });
}

void mix_experts(const Experts& x, const ExpertsArgs& args, ExpertsWorkspace& w, char* prepared,
                 ThreadTeam::Member& member) {
  const IsaKernels& isa = selected_isa();
  const int n = x.router.num_experts, k = x.router.top_k, E = x.gate_up.in, width = x.width();
  const int64_t bytes = isa.activation_bytes(x.gate_up), down_bytes = isa.activation_bytes(x.down);
  if (member.id == 0) w.experts.resize(args.T * k), w.weights.resize(args.T * k), w.rows.resize(args.T * k);
  member.barrier();

  member.parallel_for(args.T, [&](int begin, int end) {
    for (int t = begin; t < end; ++t) {
      route(x.router, args.scores + int64_t(t) * n, &w.experts[t * k], &w.weights[t * k]);
      isa.prepare_activations(x.gate_up, args.x + int64_t(t) * E, prepared + t * bytes);
    }
  });
  member.barrier();
  if (member.id == 0) sort_choices(x, args.T * k, w);
  member.barrier();

  char* const sorted = prepared + args.T * bytes;
  member.parallel_for(args.T, [&](int begin, int end) {
    for (int c = begin * k; c < end * k; ++c)
      if (w.rows[c] >= 0) memcpy(sorted + w.rows[c] * bytes, prepared + c / k * bytes, bytes);
  });
  member.barrier();
  grouped_gemm(x.gate_up, x.inner_size(), x.gate_up_bias, sorted, args.hidden, w, member);
  member.barrier();

  member.parallel_for(w.row_begin.back(), [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      float* const gate = args.hidden + int64_t(row) * x.inner_size();
      isa.activate(x.act, gate, x.is_gated ? gate + width : nullptr, width, gate);
      isa.prepare_activations(x.down, gate, prepared + row * down_bytes);
    }
  });
  member.barrier();
  grouped_gemm(x.down, E, x.down_bias, prepared, args.y, w, member);
  member.barrier();

  member.parallel_for(args.T, [&](int begin, int end) {
    for (int t = begin; t < end; ++t) {
      float* const out = args.out.y + t * args.out.ldy;
      if (!args.out.accumulate) std::fill(out, out + E, 0.0f);
      for (int c = t * k; c < (t + 1) * k; ++c) {
        if (w.rows[c] < 0) continue;
        const float* const y = args.y + int64_t(w.rows[c]) * E;
        for (int i = 0; i < E; ++i) out[i] += w.weights[c] * y[i];
      }
    }
  });
}

}  // namespace retain
