#include "this_cpu.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace onnxpar {
#if defined(__x86_64__)
namespace {

constexpr uint32_t Bit(int number) { return uint32_t{1} << number; }

/// The registers that the instruction CPUID returns for leaf number `number`; zeros if the CPU does
/// not have the leaf.
struct Leaf {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  explicit Leaf(uint32_t number) { __get_cpuid_count(number, 0, &a, &b, &c, &d); }
};

/// Returns which registers the operating system saves, as the bits of XCR0.
uint32_t SavedRegisters() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

bool HasAll(uint32_t found, uint32_t wanted) { return (found & wanted) == wanted; }

}  // namespace

// The levels are those of the x86-64 psABI, section 3.1.1; the bits, those of Intel's manual,
// volume 2, CPUID, and volume 1, section 13.3.
int FindCpuLevel() {
  const Leaf basic(1), features(7), extended(0x80000001);
  constexpr uint32_t kFma = Bit(12), kMovbe = Bit(22), kOsXsave = Bit(27), kAvx = Bit(28),
                     kF16c = Bit(29);
  if (!HasAll(basic.c, kFma | kMovbe | kOsXsave | kAvx | kF16c)) return 1;
  constexpr uint32_t kBmi1 = Bit(3), kAvx2 = Bit(5), kBmi2 = Bit(8), kLzcnt = Bit(5);
  if (!HasAll(features.b, kBmi1 | kAvx2 | kBmi2) || !HasAll(extended.c, kLzcnt)) return 1;
  const uint32_t saved = SavedRegisters();
  constexpr uint32_t kSse = Bit(1), kYmm = Bit(2), kMasksAndZmm = Bit(5) | Bit(6) | Bit(7);
  if (!HasAll(saved, kSse | kYmm)) return 1;
  constexpr uint32_t kAvx512 =
      Bit(16) | Bit(17) | Bit(28) | Bit(30) | Bit(31);  // F, DQ, CD, BW, VL
  return HasAll(features.b, kAvx512) && HasAll(saved, kMasksAndZmm) ? 4 : 3;
}
#else
int FindCpuLevel() { return 1; }
#endif

}  // namespace onnxpar
