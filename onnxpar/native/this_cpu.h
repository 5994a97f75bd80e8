// Loops that are compiled once for each level of x86-64.
#pragma once

namespace onnxpar {

/// Returns the CPU's level of x86-64: 1, 3 or 4. The operating system must save the registers of
/// the level.
int FindCpuLevel();

inline int CpuLevel() {
  static const int level = FindCpuLevel();
  return level;
}

/// Compiled into its callers: a version for each level has all its code for that level.
#define ONNXPAR_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__)
// As lists, because Clang takes nothing from arch= where its command line has a list, too.
#define ONNXPAR_LEVEL_3 "avx,avx2,bmi,bmi2,f16c,fma,lzcnt,movbe"
#define ONNXPAR_LEVEL_4 ONNXPAR_LEVEL_3 ",avx512f,avx512bw,avx512cd,avx512dq,avx512vl"

template <typename Work>
__attribute__((target(ONNXPAR_LEVEL_4), flatten)) auto AtLevel4(const Work& work) {
  return work();
}

template <typename Work>
__attribute__((target(ONNXPAR_LEVEL_3), flatten)) auto AtLevel3(const Work& work) {
  return work();
}
#endif

/// Runs a function of this file in the version for this CPU. GCC compiles all functions that it
/// calls into each version; Clang compiles into it the functions that it calls directly, and
/// functions with ONNXPAR_INLINE. The compiler's target_clones would not do: Clang has no clones of
/// templates, and asks a library for the level that always says 1 in the compiler of our wheels.
template <typename Work>
inline auto OnThisCpu(const Work& work) {
#if defined(__x86_64__)
  switch (CpuLevel()) {
    case 4:
      return AtLevel4(work);
    case 3:
      return AtLevel3(work);
    default:
      break;
  }
#endif
  return work();
}

}  // namespace onnxpar
