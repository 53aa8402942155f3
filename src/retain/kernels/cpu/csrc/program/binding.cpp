// The Python module `_C`. Python checks types and shapes and passes tensors as addresses, sizes and strides. A call
// costs less than exporting one tensor by DLPack; without a program, a decode step makes two calls in every layer.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "program/record.h"
#include "slots/resident_slots.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace retain;

template <class T>
static T* ptr(Address a) {
  return reinterpret_cast<T*>(a);
}

static DType dtype_of(bool bf16) { return bf16 ? DType::bfloat16 : DType::float32; }

static StridedRows strided_rows(Address data, int64_t token_stride, int64_t head_stride, bool bf16) {
  return {ptr<void>(data), token_stride, head_stride, dtype_of(bf16)};
}

static PackedWeight packed_weight(Address data, int out, int in, int format) {
  return retain::packed_weight({data, out, in, format});
}

static void bind_structs(nb::module_& m) {
  nb::class_<Pool>(m, "Pool")
      .def("__init__", [](Pool* p) { new (p) Pool{}; })  // without memory
      .def("__init__",
           [](Pool* p, Address k, Address v, Address pos, Address mass, int64_t num_pages, int S, int k_dim,
              int v_dim, int mass_columns, int dtype, int64_t key_stride, int64_t value_stride, Address sketches,
              int64_t sketch_stride, ResidentSlots* resident) {
             new (p) Pool{ptr<void>(k), ptr<void>(v), ptr<int32_t>(pos), ptr<float>(mass), num_pages, S, k_dim,
                          v_dim, mass_columns, DType(dtype), key_stride, value_stride, ptr<uint8_t>(sketches),
                          sketch_stride, resident};
           },
           "k"_a, "v"_a, "pos"_a, "mass"_a, "num_pages"_a, "S"_a, "k_dim"_a, "v_dim"_a, "mass_columns"_a, "dtype"_a,
           "key_stride"_a, "value_stride"_a, "sketches"_a, "sketch_stride"_a, "resident"_a.none())
      .def_prop_ro("record_bytes", &Pool::record_bytes);
  nb::class_<ResidentSlots>(m, "ResidentSlots")
      .def(nb::init<int64_t, int64_t, int64_t>())
      .def("forget", [](ResidentSlots& r, nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu> pages, int S) {
        for (size_t i = 0; i < pages.size(); ++i) r.forget_page(pages.data()[i], S);
      })
      .def_prop_ro("num_read", &ResidentSlots::num_read)
      .def_prop_ro("num_loaded", &ResidentSlots::num_loaded);
  nb::class_<AttentionScoring>(m, "AttentionScoring")
      .def(nb::init<>())  // without weights: no mass changes
      .def("__init__", [](AttentionScoring* s, Address weights, Address temperature, Address decay, Address noise,
                          Address seed, Address noise_period, int layer) {
        new (s) AttentionScoring{ptr<float>(weights), ptr<float>(temperature), ptr<float>(decay), ptr<int32_t>(noise),
                                 ptr<int32_t>(seed), ptr<int32_t>(noise_period), layer};
      });
  nb::class_<AttentionParams>(m, "AttentionParams")
      .def("__init__", [](AttentionParams* p, float scale, Address alibi_slopes, Address key_offset, float softcap,
                          Address sink_logits, int first_head) {
        new (p) AttentionParams{scale, ptr<float>(alibi_slopes), ptr<float>(key_offset), softcap,
                                ptr<float>(sink_logits), first_head};
      });
  nb::class_<Router>(m, "Router")
      .def("__init__", [](Router* r, int num_experts, int top_k, bool is_sigmoid, bool normalize, float scale,
                          Address bias, int num_groups, int top_groups, int group_best, Address expert_scale,
                          float sum_epsilon) {
        new (r) Router{num_experts, top_k, is_sigmoid, normalize, scale, ptr<float>(bias), num_groups, top_groups,
                       group_best, ptr<float>(expert_scale), sum_epsilon};
      });
  nb::class_<Experts>(m, "Experts")
      .def("__init__", [](Experts* e, const Router& router, int first, int count, WeightArgs gate_up, WeightArgs down,
                          Address gate_up_bias, Address down_bias, int act, bool is_gated) {
        new (e) Experts{router, first, count, packed_weight(gate_up), packed_weight(down), ptr<float>(gate_up_bias),
                        ptr<float>(down_bias), Activation(act), is_gated};
      });
  nb::class_<RankMemory>(m, "RankMemory")
      .def("__init__", [](RankMemory* r, Address memory, int rank, int size, int64_t chunk_bytes) {
        new (r) RankMemory(ptr<void>(memory), rank, size, chunk_bytes);
      });
  nb::enum_<UpdateRule>(m, "UpdateRule")
      .value("gated_delta", UpdateRule::gated_delta)
      .value("mamba2", UpdateRule::mamba2);
  nb::class_<LinearAttention>(m, "LinearAttention")
      .def("__init__", [](LinearAttention* a, int num_key_heads, int num_value_heads, int k_dim, int v_dim, Address decay,
                          Address time_bias, UpdateRule rule, Address skip, float min_step, float max_step) {
        new (a) LinearAttention{num_key_heads, num_value_heads, k_dim, v_dim, ptr<float>(decay), ptr<float>(time_bias),
                                rule, ptr<float>(skip), min_step, max_step};
      });
  nb::class_<PageTables>(m, "PageTables")
      .def("__init__", [](PageTables* t) { new (t) PageTables{}; })
      .def("__init__",
           [](PageTables* t, Address pages, int64_t page_row_stride, int64_t page_head_stride, Address page_counts,
              int64_t count_row_stride, int64_t count_head_stride, Address windows, int64_t window_row_stride,
              Address rows, Address query_start_loc, int B, int G, int64_t num_rows, int64_t max_pages,
              int64_t page_layer_stride, int64_t count_layer_stride, int64_t window_layer_stride, Address looks) {
             new (t) PageTables{ptr<int32_t>(pages), page_row_stride, page_head_stride, ptr<int32_t>(page_counts),
                                count_row_stride, count_head_stride, ptr<int32_t>(windows), window_row_stride,
                                ptr<int32_t>(rows), ptr<int32_t>(query_start_loc), B, G, num_rows, max_pages,
                                page_layer_stride, count_layer_stride, window_layer_stride, ptr<int32_t>(looks)};
           });
}

static void bind_program(nb::module_& m) {
  nb::class_<GroupArgs>(m, "GroupArgs")
      .def("__init__", [](GroupArgs* g, const Pool& kv, const PageTables& tables, const Pool& demoted_kv,
                          const PageTables& demoted_tables, Address slots, int64_t layer_stride, int64_t head_stride,
                          int64_t token_stride, int num_layers) {
        new (g) GroupArgs{kv, tables, demoted_kv, demoted_tables, ptr<int32_t>(slots), layer_stride, head_stride,
                          token_stride, num_layers};
      });
  nb::enum_<Products>(m, "Products")
      .value("integers", Products::integers)
      .value("bfloat16", Products::bfloat16);
  nb::class_<Program>(m, "Program")
      .def(nb::init<>())
      .def_prop_ro_static("LOGITS", [](nb::handle) { return int(Program::LOGITS); })
      .def("buffer", &Program::buffer)
      .def("rope_table",
           [](Program& p, Address freqs, int n, float gain, bool interleaved) {
             return p.add_rope_table(ptr<float>(freqs), n, gain, interleaved);
           })
      .def("add", [](Program& p, const std::string& name, nb::dict fields) { add_operation(p, name, Record(fields)); })
      .def("buffer_address",
           [](const Program& p, int buffer) { return reinterpret_cast<Address>(p.buffer_address(buffer)); })
      .def("num_ops", &Program::num_ops)
      .def("reserve_logits", &Program::reserve_logits)
      .def(
          "run",
          [](Program& p, const std::vector<GroupArgs>& groups, const std::vector<std::pair<int, int>>& layers,
             Address ids, Address pos, Address logits_indices, Address logits, int T, int N,
             const AttentionScoring& scoring, const std::vector<std::pair<int, int>>& bfloat16_rows,
             Address hidden_states, int hidden_size, Address adapters, int begin, int end) {
            std::vector<RowRange> ranges;
            for (const auto& [first, last] : bfloat16_rows) ranges.push_back({first, last});
            return p.run({T, N, ptr<int64_t>(ids), ptr<int32_t>(pos), ptr<int64_t>(logits_indices), ptr<float>(logits),
                          groups, layers, scoring, ranges, ptr<float>(hidden_states), hidden_size,
                          ptr<int32_t>(adapters)}, begin, end);
          },
          nb::call_guard<nb::gil_scoped_release>());
}

NB_MODULE(_C, m) {
  nb::set_leak_warnings(false);  // a thread that outlives main may still hold a program; this leak is harmless

  bind_structs(m);
  bind_program(m);
  m.def("packed_bytes", [](int out, int in, int format) {
    const PackedWeight w = packed_weight(0, out, in, format);
    return w.tile_bytes() * w.num_tiles();
  });
  m.def(
      "pack",
      [](Address numbers, Address scale, Address shift, Address data, int out, int in, int format) {
        pack({ptr<void>(numbers), ptr<uint16_t>(scale), ptr<uint16_t>(shift)}, packed_weight(data, out, in, format));
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "pack_blocks",
      [](Address blocks, int64_t row_bytes, int ggml_type, int rows, int first, Address data, int out, int in,
         int format) {
        return pack_blocks({ptr<uint8_t>(blocks), row_bytes, GgmlType(ggml_type)}, rows, first,
                           packed_weight(data, out, in, format));
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "row_energies",
      [](Address blocks, int64_t row_bytes, int ggml_type, int rows, int in, Address factors, Address energies) {
        row_energies({ptr<uint8_t>(blocks), row_bytes, GgmlType(ggml_type)}, rows, in, ptr<float>(factors),
                     ptr<float>(energies));
      },
      nb::call_guard<nb::gil_scoped_release>());
  // A single product, for tests.
  m.def(
      "packed_gemm",
      [](Address data, int out, int in, int format, Products products, Address x, int rows, Address bias, Address y,
         bool add) {
        const PackedWeight w = packed_weight(data, out, in, format).with(products);
        AlignedVector<char> prepared(max_activation_bytes(w) * round_up(rows, MAX_PADDED_ROWS));
        ThreadTeam::run(false, [&](ThreadTeam::Member& member) {
          packed_gemm(w, ptr<float>(x), in, {{products, 0, rows}}, prepared.data(), 0,
                      {ptr<float>(y), out, ptr<float>(bias), add}, member);
        });
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def("supported_isas", [] {
    nb::list names;
    for (const IsaKernels& i : supported_isas()) names.append(i.name);
    return names;
  });
  m.def("selected_isa", [] { return selected_isa().name; });
  m.def("select_isa", &select_isa);

  m.def(
      "write",
      [](const Pool& kv, Address slots, int64_t slot_head_stride, int64_t slot_token_stride, int T, int G, Address k,
         int64_t k_token_stride, int64_t k_head_stride, Address v, int64_t v_token_stride, int64_t v_head_stride,
         bool bf16, Address pos) {
        write({kv, strided_rows(k, k_token_stride, k_head_stride, bf16),
               strided_rows(v, v_token_stride, v_head_stride, bf16), ptr<int32_t>(slots), slot_head_stride,
               slot_token_stride, ptr<int32_t>(pos), T, G});
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "read_slots",
      [](const Pool& kv, Address slots, int64_t n, Address k, Address v) {
        read_slots(kv, ptr<int64_t>(slots), n, ptr<float>(k), ptr<float>(v));
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "requantize",
      [](const Pool& kv, Address src, const Pool& to, Address dst, Address pos, int64_t n) {
        requantize({kv, to, ptr<int64_t>(src), ptr<int64_t>(dst), ptr<int32_t>(pos), n});
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "attend",
      [](const Pool& kv, const PageTables& tables, const Pool& demoted_kv, const PageTables& demoted_tables, Address q,
         int64_t q_token_stride, int64_t q_head_stride, bool bf16, Address o, Address q_pos, int T, int R,
         const AttentionParams& params, const AttentionScoring& scoring) {
        attend({kv, tables, demoted_kv, demoted_tables, strided_rows(q, q_token_stride, q_head_stride, bf16),
                ptr<void>(o), ptr<int32_t>(q_pos), T, R, params, scoring});
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "move",
      [](const Pool& kv, Address src, Address dst, int64_t lists, int64_t n) {
        move(kv, ptr<int32_t>(src), ptr<int32_t>(dst), lists, n);
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "select_victims",
      [](Address priority, Address pos, Address lengths, int64_t N, int64_t S, int32_t first_evictable,
         int32_t last_evictable, int n, Address victims) {
        select_victims({ptr<float>(priority), ptr<int32_t>(pos), ptr<int32_t>(lengths), N, S, first_evictable,
                        last_evictable}, n, ptr<int64_t>(victims));
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "punch",
      [](const Pool& kv, Address pages, int64_t page_row, int64_t page_layer, int64_t page_head, int64_t num_rows,
         int64_t L, int64_t max_pages, Address rows, Address layers, Address slots_used, Address evictable,
         Address by_mass, int64_t B, int64_t M, int64_t G, Address holes, int64_t hole_row, int64_t hole_layer,
         int64_t hole_head, int n) {
        punch(kv,
              {ptr<int32_t>(pages), page_row, page_layer, page_head, num_rows, L, max_pages, ptr<int32_t>(rows),
               ptr<int32_t>(layers), ptr<int32_t>(slots_used), ptr<int32_t>(evictable), ptr<int32_t>(by_mass), B, M,
               G},
              {ptr<int32_t>(holes), hole_row, hole_layer, hole_head}, n);
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "copy",
      [](const Pool& kv, Address src, Address dst, int64_t n) {
        copy(kv, ptr<int64_t>(src), ptr<int64_t>(dst), n);
      },
      nb::call_guard<nb::gil_scoped_release>());
}
