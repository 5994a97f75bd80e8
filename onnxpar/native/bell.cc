#include "bell.h"

#include "futex.h"

namespace onnxpar {
namespace {

bool Reaches(uint32_t count, uint32_t awaited) {
  return static_cast<int32_t>(count - awaited) >= 0;
}

}  // namespace

/// First stores the count and then loads the number of sleepers, while Wait does these in the
/// opposite order. So either this process sees the sleeper, or the sleeper sees the new count.
void Bell::Ring(uint32_t awaited) {
  const uint32_t now = count.fetch_add(1, std::memory_order_seq_cst) + 1;
  if (Reaches(now, awaited) && sleepers.load(std::memory_order_seq_cst) != 0) Wake(count);
}

bool Bell::Wait(uint32_t wanted, bool spins, std::chrono::milliseconds longest) {
  const auto has_come = [&] { return Reaches(count.load(std::memory_order_acquire), wanted); };
  if (Look(spins, has_come, [] { return false; })) return true;
  const auto until = std::chrono::steady_clock::now() + longest;
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  bool come = false;
  for (;;) {
    const uint32_t now = count.load(std::memory_order_seq_cst);
    come = Reaches(now, wanted);
    const auto left = until - std::chrono::steady_clock::now();
    if (come || left <= left.zero()) break;
    Sleep(count, now, std::chrono::ceil<std::chrono::milliseconds>(left));
  }
  sleepers.fetch_sub(1, std::memory_order_relaxed);
  return come;
}

}  // namespace onnxpar
