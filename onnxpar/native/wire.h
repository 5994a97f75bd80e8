// TCP connections that carry frames: a length, a kind, and fields.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "messages.h"

namespace onnxpar {

/// The longest frame in bytes; longer ones are skipped.
constexpr size_t kMaxFrame = 16 << 20;
/// The longest frame of a connection that has not sent its Hello.
constexpr size_t kMaxHello = 4096;

/// A TCP connection, closed on destruction. Its methods never block. It buffers at most one
/// incoming frame, and outgoing bytes of at most twice the longest frame.
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
  /// Allows frames of kMaxFrame bytes from now on.
  void Trust() { longest_ = kMaxFrame; }

  /// Reads some of the bytes that have arrived. Returns false at the end of the connection; Next
  /// still returns the frames before it.
  bool Fill();
  /// Returns the next frame, if it is complete. Throws ProtocolError for a frame that is too long
  /// or empty; the next call continues after that frame.
  std::optional<Frame> Next();

  /// Queues a message and writes as much as the socket accepts.
  template <typename Message>
  void Send(const Message& message) {
    Queue(Encode(message));
  }
  /// Writes queued bytes; discards them if the connection is broken, which Fill reports.
  void Flush();
  bool wants_to_write() const { return !outgoing_.empty(); }
  /// True if frames were discarded because the other end did not read for too long.
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

/// True if no other host can reach the address. Throws if it cannot be resolved.
bool IsLoopback(const Address& address);

/// Listens on `address` and returns the socket. If the port is 0, takes a free one and sets it in
/// `address`. Throws std::system_error.
int Listen(Address* address);

/// Returns a descriptor for waking a thread that polls it. Throws std::system_error.
int NewEvent();

/// Returns the name of this host.
std::string HostName();

/// Connects to an address; returns a closed connection if nothing listens there. Throws
/// std::system_error if this process cannot open a socket.
Connection Connect(const Address& address, std::chrono::milliseconds timeout);

/// Returns a timeout for poll(), at most an hour, because poll() takes an int; -1 for a negative
/// timeout.
int PollTime(std::chrono::milliseconds timeout);

/// Returns the text that says why this process can open no more sockets and files, and what to do.
std::string OutOfDescriptors();

}  // namespace onnxpar
