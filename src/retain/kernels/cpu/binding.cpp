// The Python module. Tensors arrive as addresses, sizes and strides: __init__.py has checked types and shapes, and
// a call costs less than one crossing of DLPack would. A decode step makes two of these calls in every layer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "kernels.h"

namespace nb = nanobind;
using namespace retain;
using Address = uintptr_t;

template <class T>
static T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

static Pool pool(Address k, Address v, Address pos, int64_t n_pages, int S, int D, bool bf16) {
  return {at<void>(k), at<void>(v), at<int32_t>(pos), n_pages, S, D, bf16 ? Type::bfloat16 : Type::float32};
}

static Rows rows(Address data, int64_t token, int64_t head, bool bf16) {
  return {at<void>(data), token, head, bf16 ? Type::bfloat16 : Type::float32};
}

NB_MODULE(_C, m) {
  m.def("isas", [] {
    nb::list names;
    for (const Isa& i : isas()) names.append(i.name);
    return names;
  });
  m.def("isa", [] { return isa().name; });
  m.def("set_isa", &set_isa);

  m.def(
      "write",
      [](Address pool_k, Address pool_v, Address pool_pos, int64_t n_pages, int S, int D, bool pool_bf16,  //
         Address slots, int64_t slot_head, int64_t slot_token, int T, int G,                               //
         Address k, int64_t k_token, int64_t k_head, Address v, int64_t v_token, int64_t v_head, bool bf16,
         Address pos) {
        write({pool(pool_k, pool_v, pool_pos, n_pages, S, D, pool_bf16), rows(k, k_token, k_head, bf16),
               rows(v, v_token, v_head, bf16), at<int32_t>(slots), slot_head, slot_token, at<int32_t>(pos), T, G});
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "attend",
      [](Address pool_k, Address pool_v, Address pool_pos, int64_t n_pages, int S, int D, bool pool_bf16,  //
         Address pages, int64_t page_row, int64_t page_head, Address counts, int64_t count_row, int64_t count_head,
         Address windows, int64_t window_row, Address sinks, int64_t sink_row,  //
         Address table_rows, Address starts, int B, int G, int64_t N, int64_t n,  //
         Address q, int64_t q_token, int64_t q_head, bool bf16, Address o, Address q_pos, int T, int R,  //
         float scale, Address slopes) {
        attend({pool(pool_k, pool_v, pool_pos, n_pages, S, D, pool_bf16),
                {at<int32_t>(pages), page_row, page_head, at<int32_t>(counts), count_row, count_head,
                 at<int32_t>(windows), window_row, at<int32_t>(sinks), sink_row,  //
                 at<int32_t>(table_rows), at<int32_t>(starts), B, G, N, n},
                rows(q, q_token, q_head, bf16), at<void>(o), at<int32_t>(q_pos), T, R, scale,
                at<float>(slopes)});
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "copy",
      [](Address pool_k, Address pool_v, Address pool_pos, int64_t n_pages, int S, int D, bool pool_bf16, Address src,
         Address dst, int64_t n) {
        copy(pool(pool_k, pool_v, pool_pos, n_pages, S, D, pool_bf16), at<int64_t>(src), at<int64_t>(dst), n);
      },
      nb::call_guard<nb::gil_scoped_release>());
}
