// Lists the instruction sets that this machine supports, and selects one. The selection is the backend's only state.
#include <algorithm>
#include <stdexcept>

#if defined(RETAIN_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef RETAIN_ARM
#ifdef __linux__
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#endif

#include "kernels.h"

namespace retain {

#define DECLARE_KERNELS(isa)                                                                                          \
  namespace isa {                                                                                                     \
  void gather_queries(const AttentionArgs&, const QueryTile&, float* scratch);                                        \
  bool attend_tile(const AttentionArgs&, const QueryTile&, int block, float* scratch, float* partials,                \
                   const MassBuffers*);                                                                               \
  void merge_partials(float* total, const float* next, int rows, int D);                                              \
  void reduce_mass(const AttentionArgs&, const QueryTile&, const MassBuffers&, const float* factors, float decay);    \
  void write(const WriteArgs&, int g, int begin, int end);                                                            \
  void read_slots(const Pool&, const int64_t* slots, int64_t n, float* k, float* v);                                  \
  void requantize(const RequantizeArgs&, int64_t begin, int64_t end);                                                 \
  int64_t activation_bytes(const PackedWeight&);                                                                      \
  void prepare_activations(const PackedWeight&, const float* x, char* row);                                           \
  void packed_gemm(const PackedWeight&, int begin, int end, const char* prepared, int rows, const OutputView&);       \
  void unpack_row(const PackedWeight&, int64_t index, float factor, bool add, float* out);                            \
  bool pack_blocks(const BlockRows&, int begin, int end, const PackedWeight&, char* tile, int lane);                  \
  void normalize(const NormParams&, const float* x, int n, bool add, float* out);                                     \
  void activate(Activation, const float* x, const float* gate, int n, float* out);                                    \
  void rope(float* x, const float* angles, int n, bool interleaved);                                                  \
  void convolve(const ConvolutionArgs&, int block);                                                                   \
  void attend_linearly(const LinearAttentionArgs&, int b, int h, float* scratch);                                     \
  }
#define KERNELS(isa)                                                                                          \
  isa::gather_queries, isa::attend_tile, isa::merge_partials, isa::reduce_mass, isa::write, isa::read_slots,  \
      isa::requantize, isa::activation_bytes, isa::prepare_activations, isa::packed_gemm, isa::unpack_row,    \
      isa::pack_blocks, isa::normalize, isa::activate, isa::rope, isa::convolve, isa::attend_linearly
#define HAS(feature) __builtin_cpu_supports(feature)

DECLARE_KERNELS(plain)
#ifdef RETAIN_EMULATE_AMX
DECLARE_KERNELS(amx_emulated)
#endif
#ifdef RETAIN_X86
DECLARE_KERNELS(avx2)
DECLARE_KERNELS(avx512)
DECLARE_KERNELS(avx512bf16)
DECLARE_KERNELS(amx)
static bool has_avx512() {
  return HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl") && HAS("avx512dq") && HAS("avx512vnni") && HAS("fma");
}
// Tiles are a large state, which Linux saves only for processes that have asked for it.
static bool has_amx() {
#ifdef __linux__
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return has_avx512() && HAS("avx512bf16") && HAS("amx-tile") && HAS("amx-int8") && HAS("amx-bf16") &&
         syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}
#endif

#ifdef RETAIN_ARM
DECLARE_KERNELS(neon_dotprod)
DECLARE_KERNELS(neon_i8mm)
#ifdef __linux__
static bool has_bits(unsigned long type, unsigned long bits) { return (getauxval(type) & bits) == bits; }
static bool has_dotprod() { return has_bits(AT_HWCAP, 1 << 20); }                                 // HWCAP_ASIMDDP
static bool has_i8mm() { return has_dotprod() && has_bits(AT_HWCAP2, 1 << 13 | 1 << 14); }  // HWCAP2_I8MM, _BF16
#elif defined(__APPLE__)
static bool has_feature(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}
static bool has_dotprod() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
static bool has_i8mm() {
  return has_dotprod() && has_feature("hw.optional.arm.FEAT_I8MM") && has_feature("hw.optional.arm.FEAT_BF16");
}
#else
static bool has_dotprod() { return false; }
static bool has_i8mm() { return false; }
#endif
#endif

constexpr int TWO_TILES = 32;  // rows that share the keys and values which tiles load

static const IsaKernels compiled[] = {
#ifdef RETAIN_X86
    {"amx", has_amx, TWO_TILES, KERNELS(amx)},
    {"avx512bf16", [] { return has_avx512() && HAS("avx512bf16") != 0; }, MAX_TILE_ROWS, KERNELS(avx512bf16)},
    {"avx512", has_avx512, MAX_TILE_ROWS, KERNELS(avx512)},
    {"avx2", [] { return HAS("avx2") && HAS("fma"); }, MAX_TILE_ROWS, KERNELS(avx2)},
#endif
#ifdef RETAIN_ARM
    {"neon_i8mm", has_i8mm, MAX_TILE_ROWS, KERNELS(neon_i8mm)},
    {"neon_dotprod", has_dotprod, MAX_TILE_ROWS, KERNELS(neon_dotprod)},
#endif
    {"plain", [] { return true; }, MAX_TILE_ROWS, KERNELS(plain)},
#ifdef RETAIN_EMULATE_AMX
    {"amx_emulated", [] { return true; }, TWO_TILES, KERNELS(amx_emulated)},  // for tests: slow
#endif
};

const std::vector<IsaKernels>& supported_isas() {
  static const std::vector<IsaKernels> supported = [] {
    std::vector<IsaKernels> found;
    for (const IsaKernels& i : compiled)
      if (i.is_supported()) found.push_back(i);
#ifdef RETAIN_X86
    // Intel's vdpbf16ps takes as long as four vfmadd, which multiply twice as many numbers (log/cpu-speed.md).
    const auto bf16 = std::find_if(found.begin(), found.end(),
                                   [](const IsaKernels& i) { return i.name == std::string("avx512bf16"); });
    if (__builtin_cpu_is("intel") && bf16 != found.end()) std::iter_swap(bf16, bf16 + 1);
#endif
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
  throw std::invalid_argument("instruction set '" + name + "' does not run here: choose one of " + names);
}

}  // namespace retain
