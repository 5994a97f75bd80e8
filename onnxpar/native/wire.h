// Connections that carry frames: a length, a kind, and fields.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "messages.h"
#include "tcp_socket.h"

namespace onnxpar {

/// The longest frame in bytes; longer ones are skipped.
constexpr size_t kMaxFrame = 16 << 20;

/// A connection whose methods never block. It buffers at most one incoming frame, and outgoing
/// bytes of at most twice the longest frame.
class Connection {
 public:
  Connection() = default;
  explicit Connection(TcpSocket socket) : socket_(std::move(socket)) {}

  int descriptor() const { return socket_.descriptor(); }
  bool open() const { return socket_.open(); }
  void Close() { socket_.Close(); }
  /// The host of this end, as the other end knows it.
  std::string LocalHost() const { return socket_.LocalHost(); }

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

  TcpSocket socket_;
  size_t skip_ = 0;  // bytes of a frame that is too long
  bool overflowed_ = false;
  std::string incoming_;
  std::string outgoing_;
};

/// Returns a descriptor for waking a thread that polls it. Throws std::system_error.
int NewEvent();

/// Returns a timeout for poll(), at most an hour, because poll() takes an int; -1 for a negative
/// timeout.
int PollTime(std::chrono::milliseconds timeout);

}  // namespace onnxpar
