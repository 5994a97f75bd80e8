#include "wire.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace onnxpar {
namespace {

constexpr size_t kLengthBytes = sizeof(uint32_t);
/// The most bytes to read from one connection at a time, so that no connection delays the others.
constexpr size_t kChunk = 64 << 10;

}  // namespace

/// Expects that Next was called until it returned no frame, so that `incoming_` has less than one
/// frame.
bool Connection::Fill() {
  char buffer[4096];
  const auto wants = [&](size_t read) {
    return read < kChunk && incoming_.size() < kLengthBytes + kMaxFrame;
  };
  for (size_t read = 0; wants(read) || socket_.HasUnread();) {
    const ssize_t count = socket_.Read(buffer, sizeof(buffer));
    if (count > 0) {
      incoming_.append(buffer, static_cast<size_t>(count));
      read += static_cast<size_t>(count);
    } else if (count == 0) {
      return false;
    } else if (errno != EINTR) {
      return errno == EAGAIN || errno == EWOULDBLOCK;
    }
  }
  return true;
}

std::optional<Frame> Connection::Next() {
  const size_t skipped = std::min(skip_, incoming_.size());
  incoming_.erase(0, skipped);
  skip_ -= skipped;
  uint32_t size = 0;
  if (skip_ > 0 || incoming_.size() < kLengthBytes) return std::nullopt;
  std::memcpy(&size, incoming_.data(), kLengthBytes);
  if (size == 0 || size > kMaxFrame) {
    skip_ = kLengthBytes + size;
    throw ProtocolError("a frame of " + std::to_string(size) + " bytes");
  }
  if (incoming_.size() < kLengthBytes + size) return std::nullopt;
  Frame frame{static_cast<uint8_t>(incoming_[kLengthBytes]),
              incoming_.substr(kLengthBytes + 1, size - 1)};
  incoming_.erase(0, kLengthBytes + size);
  return frame;
}

void Connection::Queue(const std::string& frame) {
  if (frame.size() > 2 * kMaxFrame - std::min(2 * kMaxFrame, outgoing_.size())) {
    overflowed_ = true;
    return;
  }
  outgoing_ += frame;
  Flush();
}

void Connection::Flush() {
  while (!outgoing_.empty()) {
    const ssize_t count = socket_.Write(outgoing_.data(), outgoing_.size());
    if (count > 0) {
      outgoing_.erase(0, static_cast<size_t>(count));
    } else if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return;
    } else if (count == 0 || errno != EINTR) {
      outgoing_.clear();
    }
  }
}

int NewEvent() {
  const int event = eventfd(0, EFD_CLOEXEC);
  if (event < 0) throw std::system_error(errno, std::generic_category(), "cannot make an eventfd");
  return event;
}

int PollTime(std::chrono::milliseconds timeout) {
  if (timeout.count() < 0) return -1;
  return static_cast<int>(
      std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(1)).count());
}

}  // namespace onnxpar
