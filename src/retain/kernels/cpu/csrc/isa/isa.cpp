// Holds the kernels of every instruction set that was built, and selects one, which is the backend's only state.
#include <algorithm>
#include <stdexcept>
#include <string_view>

#include "isa/isa_support.h"
#include "kernels.h"

namespace retain {

#define ISA(isa)                                                                                                      \
  namespace isa {                                                                                                     \
  void gather_queries(const AttentionArgs&, const QueryTile&, float* scratch);                                        \
  bool attend_tile(const AttentionArgs&, const QueryTile&, int block, float* scratch, float* partials,                \
                   const MassBuffers*);                                                                               \
  void merge_partials(float* total, const float* next, int rows, int D);                                              \
  void look_weights(const AttentionArgs&, const QueryTile&, const LookPart&, float* scratch, float* maxima,           \
                    float* sums);                                                                                     \
  void look_priorities(const AttentionArgs&, const QueryTile&, const LookPart&, const float* factors,                 \
                       float* priorities);                                                                            \
  void gather_slots(const Pool& from, const int32_t* table, const int32_t* places, int64_t n, const Pool& to);        \
  void gather_records(const Pool& from, const char* records, int64_t n, const Pool& to);                              \
  void sum_means(const AttentionArgs&, const QueryTile&, const LookPart&, const float* maxima,                        \
                 const float* priorities, float highest, float* partials);                                            \
  void reduce_mass(const AttentionArgs&, const QueryTile&, const MassBuffers&, const float* factors, float decay);    \
  void write(const WriteArgs&, int g, int begin, int end);                                                            \
  void sketch_values(const Pool&, int64_t slot);                                                                      \
  void read_slots(const Pool&, const int64_t* slots, int64_t n, float* k, float* v);                                  \
  void requantize(const RequantizeArgs&, int64_t begin, int64_t end);                                                 \
  int64_t activation_bytes(const PackedWeight&);                                                                      \
  void prepare_activations(const PackedWeight&, const float* x, char* row);                                           \
  void packed_gemm(const PackedWeight&, int begin, int end, const char* prepared, int rows, const OutputView&);       \
  void unpack_row(const PackedWeight&, int64_t index, float factor, bool add, float* out);                            \
  bool pack_blocks(const BlockRows&, int begin, int end, const PackedWeight&, char* tile, int lane);                  \
  void normalize(const NormParams&, const float* x, int n, bool add, float* out);                                     \
  void add_low_rank(const LowRank&, int adapter, const float* const* x, float* const* out, int rows);                 \
  void activate(Activation, const float* x, const float* gate, int n, float* out);                                    \
  void rope(float* x, const float* angles, int n, bool interleaved);                                                  \
  void convolve(const ConvolutionArgs&, int block);                                                                   \
  void attend_linearly(const LinearAttentionArgs&, int b, int h, float* scratch);                                     \
  }
RETAIN_BUILT_ISAS  // CMake lists them: ISA(plain)ISA(avx2) for two sets
#undef ISA

// With tiles, 32 rows share the keys and values that they load.
static constexpr int max_tile_rows(std::string_view isa) { return isa.substr(0, 3) == "amx" ? 32 : MAX_TILE_ROWS; }

static const IsaKernels built[] = {
#define ISA(isa)                                                                                                   \
  {#isa, max_tile_rows(#isa), isa::gather_queries, isa::attend_tile, isa::merge_partials, isa::look_weights,        \
   isa::look_priorities, isa::gather_slots, isa::gather_records, isa::sum_means, isa::reduce_mass, isa::write,      \
   isa::sketch_values, isa::read_slots, isa::requantize, isa::activation_bytes, isa::prepare_activations,           \
   isa::packed_gemm, isa::unpack_row, isa::pack_blocks, isa::normalize, isa::add_low_rank, isa::activate,           \
   isa::rope, isa::convolve, isa::attend_linearly},
    RETAIN_BUILT_ISAS
};

static const IsaKernels* find_built(const std::string& name) {
  for (const IsaKernels& i : built)
    if (i.name == name) return &i;
  return nullptr;
}

const std::vector<IsaKernels>& supported_isas() {
  static const std::vector<IsaKernels> supported = [] {
    std::vector<IsaKernels> found;
    for (const char* name : supported_names())
      if (const IsaKernels* i = find_built(name)) found.push_back(*i);
    return found;
  }();
  return supported;
}

static const IsaKernels* selected = &supported_isas().front();

const IsaKernels& selected_isa() { return *selected; }

int64_t max_activation_bytes(const PackedWeight& w) {
  int64_t most = 0;
  for (const IsaKernels& i : supported_isas()) most = std::max(most, i.activation_bytes(w));
  return most;
}

void select_isa(const std::string& name) {
  std::string names;
  for (const IsaKernels& i : supported_isas()) {
    if (i.name == name) {
      selected = &i;
      return;
    }
    names += std::string(names.empty() ? "" : ", ") + i.name;
  }
  const char* reason = find_built(name) ? "does not run here" : "is not built (RETAIN_ISAS of CMake)";
  throw std::invalid_argument("instruction set '" + name + "' " + reason + ": choose one of " + names);
}

}  // namespace retain
