// A counter in shared memory, through which processes wait for each other.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace onnxpar {

/// Counts its rings, modulo 2^32. Memory of zeros is a bell.
struct alignas(64) Bell {
  std::atomic<uint32_t> count;
  std::atomic<uint32_t> sleepers;

  /// Adds one to the count, and wakes all sleepers if the count is now at least `awaited`, the
  /// count for which they wait. Sleepers cannot store this number themselves: before it is read,
  /// other processes may have seen the present count and wait for the next one.
  void Ring(uint32_t awaited);
  /// Waits at most `longest` until the count is `wanted`; returns true if it is. If `spins` is
  /// false, the thread sleeps almost at once.
  bool Wait(uint32_t wanted, bool spins, std::chrono::milliseconds longest);
};

}  // namespace onnxpar
