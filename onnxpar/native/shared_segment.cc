#include "shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace onnxpar {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

[[noreturn]] void ThrowErrno(const char* action, size_t bytes) {
  throw std::runtime_error(
      std::string("cannot ") + action + " " + std::to_string(bytes) +
      " bytes of shared memory: " + std::strerror(errno) +
      "; raise the limits of this process or its container (ulimit -v, -f and -n, or memory.max), "
      "or set ONNXPAR_TRANSPORT=gloo");
}

}  // namespace

/// All memory is reserved now: a later write that found no memory would end the process (SIGBUS).
/// Seals prevent other ranks, which get the descriptor, from changing the content or the size.
Segment Segment::Create(size_t lanes, size_t area_bytes) {
  const int descriptor = memfd_create("onnxpar", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  Segment segment(descriptor, lanes, area_bytes);
  const auto bytes = static_cast<off_t>(segment.bytes_);
  rlimit longest{};  // exceeding it could end the process (SIGXFSZ)
  if (getrlimit(RLIMIT_FSIZE, &longest) == 0 && longest.rlim_cur < segment.bytes_) {
    errno = EFBIG;
    ThrowErrno("create", segment.bytes_);
  }
  if (descriptor < 0 || ftruncate(descriptor, bytes) != 0) ThrowErrno("create", segment.bytes_);
  if (const int error = posix_fallocate(descriptor, 0, bytes)) {
    errno = error;
    ThrowErrno("reserve", segment.bytes_);
  }
  segment.MapMemory(PROT_READ | PROT_WRITE);
  fcntl(descriptor, F_ADD_SEALS, F_SEAL_FUTURE_WRITE);  // Linux 5.1 and later have it
  if (fcntl(descriptor, F_ADD_SEALS, kSizeSeals | F_SEAL_SEAL) != 0) {
    ThrowErrno("seal", segment.bytes_);
  }
  return segment;
}

/// Requires that the size is sealed: if its rank made the segment smaller, a read could end this
/// process.
Segment Segment::Map(int descriptor, size_t lanes, size_t area_bytes) {
  Segment segment(descriptor, lanes, area_bytes);
  struct stat status{};
  const int seals = fcntl(descriptor, F_GET_SEALS);
  if (fstat(descriptor, &status) != 0 || seals < 0 || (seals & kSizeSeals) != kSizeSeals ||
      status.st_size != static_cast<off_t>(segment.bytes_)) {
    throw std::runtime_error("it passed something else than shared memory of " +
                             std::to_string(segment.bytes_) + " bytes");
  }
  segment.MapMemory(PROT_READ);
  close(std::exchange(segment.descriptor_, -1));
  return segment;
}

void Segment::MapMemory(int protection) {
  void* const memory = mmap(nullptr, bytes_, protection, MAP_SHARED, descriptor_, 0);
  if (memory == MAP_FAILED) ThrowErrno("map", bytes_);
  memory_ = memory;
}

Segment::~Segment() {
  if (memory_ != nullptr) munmap(memory_, bytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

Segment::Segment(Segment&& other) noexcept { *this = std::move(other); }

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(lanes_, other.lanes_);
  std::swap(bytes_, other.bytes_);
  std::swap(memory_, other.memory_);
  return *this;
}

}  // namespace onnxpar
