// Unix sockets between two ranks of one host.
#pragma once

#include <chrono>
#include <string>

namespace onnxpar {

/// A Unix socket (not TCP) for messages that may pass a descriptor; closed on destruction.
class LocalSocket {
 public:
  using Clock = std::chrono::steady_clock;

  LocalSocket() = default;
  ~LocalSocket();
  LocalSocket(LocalSocket&& other) noexcept;
  LocalSocket& operator=(LocalSocket&& other) noexcept;

  /// Listens under a name, which disappears with the socket and is not visible in other network
  /// namespaces. Throws std::system_error.
  static LocalSocket Listen(const std::string& name);
  /// Connects to the socket that listens under `name`. Returns a closed socket if there is none on
  /// this host, or if it does not accept within 5 seconds. Throws std::system_error if this process
  /// cannot open a socket.
  static LocalSocket Connect(const std::string& name);
  /// Returns the next connection, or a closed socket if no connection waits.
  LocalSocket Accept() const;

  int descriptor() const { return descriptor_; }
  bool open() const { return descriptor_ >= 0; }
  /// True if the other end has closed the connection, for example because its process has ended.
  bool HasEnded() const;

  /// Sends one message together with a file descriptor. Ignores failures, which mean that the
  /// receiver has ended.
  void Send(const void* data, size_t bytes, int descriptor) const;
  /// Receives one message of `bytes` bytes into `data`. Returns the file descriptor that came with
  /// it, which the caller must close; -1 if no such message arrives before `until`.
  int Receive(void* data, size_t bytes, Clock::time_point until) const;

 private:
  explicit LocalSocket(int descriptor) : descriptor_(descriptor) {}
  bool WaitToRead(Clock::time_point until) const;

  int descriptor_ = -1;
};

}  // namespace onnxpar
