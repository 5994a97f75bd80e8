// Unix sockets between two ranks of one host.
#pragma once

#include <chrono>
#include <string>

namespace onnxpar {

/// A Unix socket for messages that may pass a descriptor, closed on destruction.
class LocalSocket {
 public:
  using Clock = std::chrono::steady_clock;

  LocalSocket() = default;
  ~LocalSocket();
  LocalSocket(LocalSocket&& other) noexcept;
  LocalSocket& operator=(LocalSocket&& other) noexcept;

  /// Listens under a name, which disappears with the socket. The name does not exist in other
  /// network namespaces. Throws std::system_error.
  static LocalSocket Listen(const std::string& name);
  /// Connects to the socket that listens under a name; returns a closed socket if no socket on this
  /// host has the name, or accepts within 5 seconds. Throws std::system_error if this process
  /// cannot open a socket.
  static LocalSocket Connect(const std::string& name);
  /// Accepts a connection; returns a closed socket if there is none.
  LocalSocket Accept() const;

  int descriptor() const { return descriptor_; }
  bool open() const { return descriptor_ >= 0; }
  /// True if the other end has been closed.
  bool HasEnded() const;

  /// Sends a message that passes `descriptor`. Ignores failures: they mean that the receiver has
  /// ended.
  void Send(const void* data, size_t bytes, int descriptor) const;
  /// Receives a message of `bytes` bytes, and returns the descriptor that it passes; -1 if no
  /// message comes in time.
  int Receive(void* data, size_t bytes, Clock::time_point until) const;

 private:
  explicit LocalSocket(int descriptor) : descriptor_(descriptor) {}
  bool WaitToRead(Clock::time_point until) const;

  int descriptor_ = -1;
};

}  // namespace onnxpar
