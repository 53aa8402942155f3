// Products with packed weights over the cores.
#include "kernels.h"

namespace retain {

void linear(const Packed& w, const float* x, int64_t ldx, int rows, char* prepared, const Into& into,
            Team::Member& me) {
  const Isa& inner = isa();
  me.share(rows, [&](int begin, int end) {
    for (int r = begin; r < end; ++r) inner.prepare(w, x + r * ldx, prepared + r * w.row_bytes());
  });
  me.barrier();
  me.share(w.tiles(), [&](int begin, int end) {
    inner.multiply(w, begin, end, prepared, rows, into);
  });
}

}  // namespace retain
