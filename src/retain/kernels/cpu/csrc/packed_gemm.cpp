// Products with packed weights, on all threads of a team.
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

}  // namespace retain
