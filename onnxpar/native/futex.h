// How processes of one host wait until a word in shared memory changes: first they look at it
// repeatedly, and after a while they sleep (futex).
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace onnxpar {

/// How long a thread looks before it sleeps. To wake a thread on an idle core takes up to 75 us in
/// a virtual machine, and a thread that looks offers its core to threads that have work.
constexpr std::chrono::microseconds kLookTime{1000};

/// True in threads whose core is needed for computing while they wait: they sleep without looking
/// first.
inline thread_local bool sleeps_at_once = false;

/// Sleeps, at most `longest`, until a process or thread calls Wake for this word. Returns at once
/// if the word's value is not `value`.
void Sleep(const std::atomic<uint32_t>& word, uint32_t value, std::chrono::milliseconds longest);

/// Wakes all threads, of all processes, that sleep on this word.
void Wake(const std::atomic<uint32_t>& word);

/// Tells the CPU that this thread is in a loop that looks at a word, so that it saves power.
void Pause();

/// Calls has_come() repeatedly until it is true; returns true then. Returns false after kLookTime,
/// or if is_over() is true. Offers the core to other threads now and then, as they may include the
/// one for which it waits; if `spins` is false, after each call.
template <typename HasCome, typename IsOver>
bool Look(bool spins, const HasCome& has_come, const IsOver& is_over) {
  constexpr int kSpins = 64;
  if (has_come()) return true;
  if (sleeps_at_once) return false;
  const auto until = std::chrono::steady_clock::now() + kLookTime;
  do {
    for (int i = 0; spins && i < kSpins; ++i) {
      Pause();
      if (has_come()) return true;
    }
    sched_yield();
    if (has_come()) return true;
    if (is_over()) return false;
  } while (std::chrono::steady_clock::now() < until);
  return false;
}

}  // namespace onnxpar
