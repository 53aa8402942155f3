// Products with packed weights, on one thread or on all threads of a team.
#include <algorithm>

#include "kernels.h"

namespace retain {

static void prepare_rows(const PackedWeight& w, const float* x, int64_t ldx, char* prepared, int begin, int end) {
  const IsaKernels& isa = selected_isa();
  for (int r = begin; r < end; ++r) isa.prepare_activations(w, x + r * ldx, prepared + r * isa.activation_bytes(w));
}

void packed_gemm(const PackedWeight& w, const float* x, int64_t ldx, int rows, char* prepared, const OutputView& out) {
  prepare_rows(w, x, ldx, prepared, 0, rows);
  selected_isa().packed_gemm(w, 0, w.num_tiles(), prepared, rows, out);
}

void packed_gemm(const PackedWeight& w, const float* x, int64_t ldx, const std::vector<RowPart>& parts, char* prepared,
                 int64_t prepared_stride, const OutputView& out, ThreadTeam::Member& member) {
  member.parallel_for(parts.back().end, [&](int begin, int end) {
    for (const RowPart& p : parts)
      prepare_rows(w.with(p.products), x + p.begin * ldx, ldx, prepared + p.begin * prepared_stride,
                   std::max(begin, p.begin) - p.begin, std::min(end, p.end) - p.begin);
  });
  member.barrier();
  const bool has_panels =
      std::any_of(parts.begin(), parts.end(), [&](auto& p) { return w.with(p.products).is_dequantized(); });
  const int step = has_panels ? PANEL_TILES : 1;
  member.parallel_for((w.num_tiles() + step - 1) / step, [&](int first, int last) {
    const int begin = first * step, end = std::min(last * step, w.num_tiles());
    for (const RowPart& p : parts)
      selected_isa().packed_gemm(w.with(p.products), begin, end, prepared + p.begin * prepared_stride, p.end - p.begin,
                                 {out.y + p.begin * out.ldy, out.ldy, out.bias, out.accumulate});
  });
}

void packed_gemm_by_head(const PackedWeight& w, const float* x, int64_t ldx, int rows, char* prepared, float* y,
                         int64_t ldy, const HeadColumns& source, const HeadColumns& target,
                         ThreadTeam::Member& member) {
  const IsaKernels& isa = selected_isa();
  const int64_t bytes = isa.activation_bytes(w);
  member.parallel_for(source.H * rows, [&](int begin, int end) {
    for (int i = begin; i < end; ++i)
      isa.prepare_activations(w, x + i % rows * ldx + source.begin(i / rows), prepared + i * bytes);
  });
  member.barrier();
  const int tiles = target.width / TILE_OUT;
  member.parallel_for(target.H * tiles, [&](int begin, int end) {
    for (int next; begin < end; begin = next) {
      const int h = begin / tiles;
      next = std::min(end, (h + 1) * tiles);
      const PackedWeight own = {w.data + w.tile_bytes() * tiles * h, target.width, w.in, w.format};
      isa.packed_gemm(own, begin - h * tiles, next - h * tiles, prepared + int64_t(h) * rows * bytes, rows,
                      {y + target.begin(h), ldy, nullptr, false});
    }
  });
}

}  // namespace retain
