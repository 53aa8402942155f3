// Which instruction sets this machine supports. CMake asks too, before anything is built (native_isa.cpp).
#pragma once

#include <vector>

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

namespace retain {

#ifdef RETAIN_X86
#define HAS(feature) __builtin_cpu_supports(feature)
static bool has_avx2() { return HAS("avx2") && HAS("fma"); }
static bool has_avx512() {
  return HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl") && HAS("avx512dq") && HAS("avx512vnni") && HAS("fma");
}
static bool has_avx512bf16() { return has_avx512() && HAS("avx512bf16"); }
// Tiles are a large state, which Linux saves only for processes that have asked for it.
static bool has_amx() {
#ifdef __linux__
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return has_avx512bf16() && HAS("amx-tile") && HAS("amx-int8") && HAS("amx-bf16") &&
         syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}
#endif

#ifdef RETAIN_ARM
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

// The names of the sets, fastest first.
inline std::vector<const char*> supported_names() {
  std::vector<const char*> names;
  const auto add = [&](const char* name, bool is_supported) {
    if (is_supported) names.push_back(name);
  };
#ifdef RETAIN_X86
  // Intel's vdpbf16ps takes as long as four vfmadd, which multiply twice as many numbers (log/cpu-speed.md).
  const bool prefers_bf16 = !__builtin_cpu_is("intel");
  add("amx", has_amx());
  add("avx512bf16", prefers_bf16 && has_avx512bf16());
  add("avx512", has_avx512());
  add("avx512bf16", !prefers_bf16 && has_avx512bf16());
  add("avx2", has_avx2());
#endif
#ifdef RETAIN_ARM
  add("neon_i8mm", has_i8mm());
  add("neon_dotprod", has_dotprod());
#endif
  add("plain", true);
  add("amx_emulated", true);  // for tests: slow
  return names;
}

}  // namespace retain
