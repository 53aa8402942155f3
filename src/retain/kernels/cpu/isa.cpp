// Which instruction sets this machine runs, and which of them is in use: the only state of this backend.
#include <stdexcept>

#include "kernels.h"

namespace retain {

#define INNER(name)                                                               \
  namespace name {                                                                \
  bool look(const Attend&, const Tile&, int span, float* scratch, float* records); \
  void write(const Write&, int g, int begin, int end);                            \
  }
INNER(plain)
#ifdef RETAIN_X86
INNER(avx2)
INNER(avx512)
#endif

static const Isa known[] = {
#ifdef RETAIN_X86
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
     },
     avx512::look, avx512::write},
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }, avx2::look, avx2::write},
#endif
    {"plain", [] { return true; }, plain::look, plain::write},
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
