// Lets processes of one host wait for words in shared memory: first they look repeatedly, then they
// sleep.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace onnxpar {

/// The time to look before sleeping. Waking a sleeper on an idle core takes up to 75 us in a
/// virtual machine, and a thread that looks offers its core to all that have work.
constexpr std::chrono::microseconds kLookTime{1000};

/// True in threads whose core computes meanwhile: they sleep without looking first.
inline thread_local bool sleeps_at_once = false;

/// Sleeps until another process or thread wakes this word; returns at once if the word has another
/// value than `value`.
void Sleep(const std::atomic<uint32_t>& word, uint32_t value, std::chrono::milliseconds longest);

/// Wakes all threads that sleep on this word.
void Wake(const std::atomic<uint32_t>& word);

/// Tells the core that this thread looks at a word repeatedly.
void Pause();

/// Looks until has_come() is true; gives up after a while, or if is_over() is true. Returns true if
/// has_come() was true. Every now and then, offers the core to other threads, as the thread for
/// which it waits may be among them; if `spins` is false, each time.
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
