// Loops that are compiled once for each level of x86-64 (sets of instructions, e.g. level 3 has
// AVX2), and run in the version for this CPU.
#pragma once

namespace onnxpar {

/// Returns the highest level of x86-64 that this CPU has, and whose registers the operating system
/// saves: 1, 3 or 4.
int FindCpuLevel();

inline int CpuLevel() {
  static const int level = FindCpuLevel();
  return level;
}

/// For functions that OnThisCpu calls indirectly: compiled into each caller, so that the version
/// for a level has all its code for that level.
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

/// Calls work() in the version for this CPU, and returns its result. `work` is compiled once for
/// each level, with all functions that it calls under GCC; under Clang, with those that it calls
/// directly and those with ONNXPAR_INLINE. The compilers' own target_clones would not do: Clang has
/// none for templates, and chooses by a library that always says level 1 in the compiler of the
/// wheels.
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
