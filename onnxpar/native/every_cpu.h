// Functions that are compiled once for each level of x86-64.
#pragma once

/// Marks such a function. What it calls is compiled into it, and the loader takes the version for
/// this CPU. The function must be in an anonymous namespace, and only be called: else the loader
/// looks for the version before code that a sanitizer checks can run.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ONNXPAR_FOR_EACH_CPU \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), flatten))
#else
#define ONNXPAR_FOR_EACH_CPU
#endif
