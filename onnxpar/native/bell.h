// A counter in memory that processes share, on which they wait for each other.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace onnxpar {

/// Counts how often it was rung; wraps around. Memory of zeros is a bell.
struct alignas(64) Bell {
  std::atomic<uint32_t> count;
  std::atomic<uint32_t> sleepers;

  /// Adds one to the count, and wakes all sleepers if the count is now at least `awaited`, which is
  /// the count that they wait for. What a sleeper itself says would not do: by the time that it is
  /// read, others may have seen this count and wait for the next one.
  void Ring(uint32_t awaited);
  /// Waits until it was rung `wanted` times, at most `longest`; returns whether it was. If `spins`
  /// is false, it hardly looks before it sleeps.
  bool Wait(uint32_t wanted, bool spins, std::chrono::milliseconds longest);
};

}  // namespace onnxpar
