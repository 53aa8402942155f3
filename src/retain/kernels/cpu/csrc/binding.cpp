// The Python module. Tensors arrive as addresses, sizes and strides: __init__.py has checked types and shapes, and
// a call costs less than one crossing of DLPack would. A decode step makes two of these calls in every layer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "program.h"

namespace nb = nanobind;
using namespace retain;
using Address = uintptr_t;

template <class T>
static T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

static Rows rows(Address data, int64_t token, int64_t head, bool bf16) {
  return {at<void>(data), token, head, bf16 ? Type::bfloat16 : Type::float32};
}

static Packed packed(Address data, int out, int in, int kind) { return {at<char>(data), out, in, Kind(kind)}; }

static void bind_structs(nb::module_& m) {
  nb::class_<Pool>(m, "Pool")
      .def("__init__",
           [](Pool* p, Address k, Address v, Address pos, Address mass, int64_t n_pages, int S, int D, int columns,
              bool bf16) {
             new (p) Pool{at<void>(k), at<void>(v), at<int32_t>(pos), at<float>(mass), n_pages, S, D, columns,
                          bf16 ? Type::bfloat16 : Type::float32};
           });
  nb::class_<Observe>(m, "Observe")
      .def(nb::init<>())  // nothing
      .def("__init__", [](Observe* o, Address weights, Address tau, Address decay, Address noise, Address seed,
                          Address anew, int layer) {
        new (o) Observe{at<float>(weights), at<float>(tau), at<float>(decay), at<int32_t>(noise), at<int32_t>(seed),
                        at<int32_t>(anew), layer};
      });
  nb::class_<Tables>(m, "Tables")
      .def("__init__",
           [](Tables* t, Address pages, int64_t page_row, int64_t page_head, Address counts, int64_t count_row,
              int64_t count_head, Address windows, int64_t window_row, Address sinks, int64_t sink_row, Address rows,
              Address starts, int B, int G, int64_t N, int64_t n) {
             new (t) Tables{at<int32_t>(pages), page_row, page_head, at<int32_t>(counts), count_row, count_head,
                            at<int32_t>(windows), window_row, at<int32_t>(sinks), sink_row, at<int32_t>(rows),
                            at<int32_t>(starts), B, G, N, n};
           });
}

static void bind_program(nb::module_& m) {
  nb::class_<Program>(m, "Program")
      .def(nb::init<>())
      .def_prop_ro_static("LOGITS", [](nb::handle) { return int(Program::LOGITS); })
      .def("buffer", &Program::buffer)
      .def("rope",
           [](Program& p, Address freqs, int n, float gain, bool neighbours) {
             return p.rope(at<float>(freqs), n, gain, neighbours);
           })
      .def("lookup",
           [](Program& p, int out, Address data, int rows, int in, int kind, bool by_position, int offset, float factor,
              bool add) { p.lookup(out, packed(data, rows, in, kind), by_position, offset, factor, add); })
      .def("normalise",
           [](Program& p, int in, int out, Address weight, Address bias, float eps, bool centred, int n, int heads,
              bool add) {
             p.normalise(in, out, {at<float>(weight), at<float>(bias), eps, centred}, n, heads, add);
           })
      .def("linear",
           [](Program& p, int in, int out, Address data, int rows, int columns, int kind, Address bias, bool add) {
             p.linear(in, out, packed(data, rows, columns, kind), at<float>(bias), add);
           })
      .def("activate",
           [](Program& p, int in, int out, int kind, int n, bool gated) {
             p.activate(in, out, Activation(kind), n, gated);
           })
      .def("clip", &Program::clip)
      .def("turn", &Program::turn)
      .def("attend",
           [](Program& p, int qkv, int out, int layer, int H, int G, int D, float scale, Address slopes) {
             p.attend(qkv, out, layer, {H, G, D}, scale, at<float>(slopes));
           })
      .def("pick", &Program::pick)
      .def("rows", [](const Program& p, int buffer) { return reinterpret_cast<Address>(p.rows(buffer)); })
      .def("size", &Program::size)
      .def(
          "run",
          [](Program& p, const Pool& kv, const Tables& tables, int layers, int64_t page_layer, int64_t count_layer,
             int64_t window_layer, Address ids, Address pos, Address wanted, Address logits, int T, int N, Address slots,
             int64_t slot_layer, int64_t slot_head, int64_t slot_token, const Observe& observe, int begin, int end) {
            p.run({T, N, at<int64_t>(ids), at<int32_t>(pos), at<int64_t>(wanted), at<float>(logits), kv,
                   at<int32_t>(slots), slot_layer, slot_head, slot_token, tables, page_layer, count_layer, window_layer,
                   layers, observe}, begin, end);
          },
          nb::call_guard<nb::gil_scoped_release>());
}

NB_MODULE(_C, m) {
  nb::set_leak_warnings(false);  // a thread that outlives main may hold a program: nothing is lost

  bind_structs(m);
  bind_program(m);
  m.def(
      "packed_bytes", [](int out, int in, int kind) { return packed(0, out, in, kind).tile_bytes() * packed(0, out, in, kind).tiles(); });
  m.def(
      "pack",
      [](Address numbers, Address scale, Address shift, Address data, int out, int in, int kind) {
        pack({at<void>(numbers), at<uint16_t>(scale), at<uint16_t>(shift)}, packed(data, out, in, kind));
      },
      nb::call_guard<nb::gil_scoped_release>());
  // One product alone, which tests compare with what it means.
  m.def(
      "linear",
      [](Address data, int out, int in, int kind, Address x, int rows, Address bias, Address y, bool add) {
        const Packed w = packed(data, out, in, kind);
        std::vector<char> prepared(w.row_bytes() * rows);
        Team::run(false, [&](Team::Member& me) {
          linear(w, at<float>(x), in, rows, prepared.data(), {at<float>(y), out, at<float>(bias), add}, me);
        });
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def("isas", [] {
    nb::list names;
    for (const Isa& i : isas()) names.append(i.name);
    return names;
  });
  m.def("isa", [] { return isa().name; });
  m.def("set_isa", &set_isa);

  m.def(
      "write",
      [](const Pool& kv, Address slots, int64_t slot_head, int64_t slot_token, int T, int G,
         Address k, int64_t k_token, int64_t k_head, Address v, int64_t v_token, int64_t v_head, bool bf16,
         Address pos) {
        write({kv, rows(k, k_token, k_head, bf16),
               rows(v, v_token, v_head, bf16), at<int32_t>(slots), slot_head, slot_token, at<int32_t>(pos), T, G});
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "attend",
      [](const Pool& kv, const Tables& tables, Address q, int64_t q_token, int64_t q_head, bool bf16, Address o,
         Address q_pos, int T, int R, float scale, Address slopes, const Observe& observe) {
        attend({kv, tables, rows(q, q_token, q_head, bf16), at<void>(o), at<int32_t>(q_pos), T, R, scale,
                at<float>(slopes), observe});
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "move",
      [](const Pool& kv, Address src, Address dst, int64_t lists, int64_t n) {
        move(kv, at<int32_t>(src), at<int32_t>(dst), lists, n);
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "lowest",
      [](Address priority, Address pos, Address used, int64_t N, int64_t S, int32_t sinks, int32_t after, int n,
         Address places) {
        lowest({at<float>(priority), at<int32_t>(pos), at<int32_t>(used), N, S, sinks, after}, n, at<int64_t>(places));
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "copy",
      [](const Pool& kv, Address src, Address dst, int64_t n) {
        copy(kv, at<int64_t>(src), at<int64_t>(dst), n);
      },
      nb::call_guard<nb::gil_scoped_release>());
}
