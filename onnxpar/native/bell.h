// A counter in memory that processes share, on which they wait for each other.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace onnxpar {

/// Counts how often it was rung; wraps around. Memory of zeros is a bell. All that wait at the same
/// time wait for the same count.
struct alignas(64) Bell {
  std::atomic<uint32_t> count;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> awaited;  // by the sleepers

  /// Adds one to the count, and wakes those who wait for the new count.
  void Ring();
  /// Waits until it was rung `wanted` times, at most `longest`; returns whether it was. If `spins`
  /// is false, it hardly looks before it sleeps.
  bool Wait(uint32_t wanted, bool spins, std::chrono::milliseconds longest);
};

}  // namespace onnxpar
