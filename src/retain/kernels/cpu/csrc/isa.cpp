// Which instruction sets this machine runs, and which of them is in use: the only state of this backend.
#include <stdexcept>

#include "kernels.h"

namespace retain {

#define INNER(name)                                                                     \
  namespace name {                                                                      \
  bool look(const Attend&, const Tile&, int span, float*, float* records, const Seen*); \
  void fold(const Attend&, const Tile&, const Seen&, const float* factors, float*);     \
  void write(const Write&, int g, int begin, int end);                                  \
  void prepare(const Packed&, const float* x, char* row);                               \
  void multiply(const Packed&, int begin, int end, const char* prepared, int rows, const Into&); \
  void lookup(const Packed&, int64_t index, float factor, bool add, float* out);        \
  void normalise(const Norm&, const float* x, int n, bool add, float* out);             \
  void activate(Activation, const float* x, const float* times, int n, float* out);     \
  void turn(float* x, const float* angles, int n, bool neighbours);                     \
  }
#define ALL(name)                                                                                                     \
  name::look, name::fold, name::write, name::prepare, name::multiply, name::lookup, name::normalise, name::activate,  \
      name::turn
#define CAN(what) __builtin_cpu_supports(what)

INNER(plain)
#ifdef RETAIN_X86
INNER(avx2)
INNER(avx512)
INNER(avx512bf16)
static bool can_avx512() {
  return CAN("avx512f") && CAN("avx512bw") && CAN("avx512vl") && CAN("avx512dq") && CAN("avx512vnni") && CAN("fma");
}
#endif

static const Isa known[] = {
#ifdef RETAIN_X86
    {"avx512bf16", [] { return can_avx512() && CAN("avx512bf16") != 0; }, ALL(avx512bf16)},
    {"avx512", can_avx512, ALL(avx512)},
    {"avx2", [] { return CAN("avx2") && CAN("fma"); }, ALL(avx2)},
#endif
    {"plain", [] { return true; }, ALL(plain)},
};

const std::vector<Isa>& isas() {
  static const std::vector<Isa> able = [] {
    std::vector<Isa> found;
    for (const Isa& i : known)
      if (i.runs()) found.push_back(i);
    return found;
  }();
  return able;
}

static const Isa* chosen = &isas().front();

const Isa& isa() { return *chosen; }

void set_isa(const std::string& name) {
  std::string here;
  for (const Isa& i : isas()) {
    if (i.name == name) {
      chosen = &i;
      return;
    }
    here += std::string(here.empty() ? "" : ", ") + i.name;
  }
  throw std::invalid_argument("instruction set '" + name + "' does not run here: choose one of " + here);
}

}  // namespace retain
