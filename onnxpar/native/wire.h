// TCP connections that carry frames: a length, a kind, and fields.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "messages.h"

namespace onnxpar {

/// Longer frames are skipped.
constexpr size_t kMaxFrame = 16 << 20;
/// The same, for a connection that has not sent its hello.
constexpr size_t kMaxHello = 4096;

/// A connection; closed on destruction. It never blocks, and buffers at most one incoming frame and
/// twice the longest outgoing frame.
class Connection {
 public:
  Connection() = default;
  explicit Connection(int descriptor, size_t longest = kMaxFrame);
  ~Connection();
  Connection(Connection&& other) noexcept;
  Connection& operator=(Connection&& other) noexcept;

  int descriptor() const { return descriptor_; }
  bool open() const { return descriptor_ >= 0; }
  void Close();
  /// From now on, frames may be as long as those of a rank.
  void Trust() { longest_ = kMaxFrame; }

  /// Reads some of the bytes that have arrived. False at the end of the connection; frames that
  /// arrived before remain.
  bool Fill();
  /// The next complete frame. Throws ProtocolError on one that is too long or empty; the next call
  /// continues after it.
  std::optional<Frame> Next();

  /// Queues a message and writes as much as the socket accepts.
  template <typename Message>
  void Send(const Message& message) {
    Queue(Encode(message));
  }
  /// Writes queued bytes, unless the connection is broken, which Fill reports.
  void Flush();
  bool wants_to_write() const { return !outgoing_.empty(); }
  /// True if frames were lost because the other end has not read for too long.
  bool overflowed() const { return overflowed_; }

 private:
  void Queue(const std::string& frame);

  int descriptor_ = -1;
  size_t longest_ = kMaxFrame;
  size_t skip_ = 0;  // bytes of a frame that is too long
  bool overflowed_ = false;
  std::string incoming_;
  std::string outgoing_;
};

struct Address {
  std::string host;
  int port = 0;

  std::string Text() const { return host + ":" + std::to_string(port); }
};

/// True if no other host can reach it. Throws if it cannot be resolved.
bool IsLoopback(const Address& address);

/// Listens on `address`, on any free port if it names none, and sets the port. Throws
/// std::system_error.
int Listen(Address* address);

/// Wakes a thread that polls it. Throws std::system_error.
int NewEvent();

/// The name of this host.
std::string HostName();

/// Connects; a closed connection if nothing listens. Throws std::system_error if this process
/// cannot open a socket.
Connection Connect(const Address& address, std::chrono::milliseconds timeout);

/// Waits, at most an hour at a time, as poll() counts in int.
int PollTime(std::chrono::milliseconds timeout);

/// Why a process can open no more sockets and files, and what to do.
std::string OutOfDescriptors();

}  // namespace onnxpar
