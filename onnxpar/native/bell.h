// A counter in shared memory, through which processes wait for each other.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace onnxpar {

/// Counts how often it was rung, modulo 2^32, so that other processes can wait for a count. It
/// needs no constructor: memory of zeros is a bell with count 0.
struct alignas(64) Bell {
  std::atomic<uint32_t> count;
  std::atomic<uint32_t> sleepers;

  /// Adds one to the count. Wakes all sleepers if the new count is at least `awaited`, the count
  /// for which they wait. The caller passes this number, because sleepers cannot store it in the
  /// bell: before it is read, other processes may already wait for the next count.
  void Ring(uint32_t awaited);
  /// Waits at most `longest` until the count has reached `wanted`. Returns true if it has. The
  /// thread looks repeatedly for a short time before it sleeps; if `spins` is false, it offers its
  /// core to other threads after each look.
  bool Wait(uint32_t wanted, bool spins, std::chrono::milliseconds longest);
};

}  // namespace onnxpar
