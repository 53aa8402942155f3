// Products with packed weights, on all threads of a team.
#include <algorithm>

#include "kernels.h"

namespace retain {

void packed_gemm(const PackedWeight& w, const float* x, int64_t ldx, int rows, AlignedVector<char>& prepared,
                 const OutputView& out, ThreadTeam::Member& member) {
  const IsaKernels& isa = selected_isa();
  char* const prepared_rows = prepared.data();
  member.parallel_for(rows, [&](int begin, int end) {
    for (int r = begin; r < end; ++r) isa.prepare_activations(w, x + r * ldx, prepared_rows + r * w.activation_bytes());
  });
  member.barrier();
  member.parallel_for(w.num_tiles(), [&](int begin, int end) {
    isa.packed_gemm(w, begin, end, prepared_rows, rows, out);
  });
}

void packed_gemm_by_head(const PackedWeight& w, const float* x, int64_t ldx, int rows, AlignedVector<char>& prepared,
                         float* y, int64_t ldy, const HeadColumns& source, const HeadColumns& target,
                         ThreadTeam::Member& member) {
  const IsaKernels& isa = selected_isa();
  const int64_t bytes = w.activation_bytes();
  char* const prepared_rows = prepared.data();  // of the first head, then those of the next
  member.parallel_for(source.H * rows, [&](int begin, int end) {
    for (int i = begin; i < end; ++i)
      isa.prepare_activations(w, x + i % rows * ldx + source.begin(i / rows), prepared_rows + i * bytes);
  });
  member.barrier();
  const int tiles = target.width / TILE_OUT;
  member.parallel_for(target.H * tiles, [&](int begin, int end) {
    for (int next; begin < end; begin = next) {
      const int h = begin / tiles;
      next = std::min(end, (h + 1) * tiles);
      const PackedWeight own = {w.data + w.tile_bytes() * tiles * h, target.width, w.in, w.format};
      isa.packed_gemm(own, begin - h * tiles, next - h * tiles, prepared_rows + int64_t(h) * rows * bytes, rows,
                      {y + target.begin(h), ldy, nullptr, false});
    }
  });
}

}  // namespace retain
