#include "futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace onnxpar {
namespace {

const uint32_t* WordOf(const std::atomic<uint32_t>& word) {
  return reinterpret_cast<const uint32_t*>(&word);
}

}  // namespace

void Sleep(const std::atomic<uint32_t>& word, uint32_t value, std::chrono::milliseconds longest) {
  const timespec time{longest.count() / 1000, longest.count() % 1000 * 1'000'000};
  syscall(SYS_futex, WordOf(word), FUTEX_WAIT, value, &time, nullptr, 0);
}

void Wake(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, WordOf(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace onnxpar
