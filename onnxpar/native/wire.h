// Connections of the control channel, which carry frames. A frame is its length, a kind, and
// fields.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "messages.h"
#include "tcp_socket.h"

namespace onnxpar {

/// The most bytes of a frame; longer frames are skipped.
constexpr size_t kMaxFrame = 16 << 20;

/// A connection whose methods never block. It keeps at most one incoming frame, and unsent bytes of
/// at most twice the longest frame.
class Connection {
 public:
  Connection() = default;
  explicit Connection(TcpSocket socket) : socket_(std::move(socket)) {}

  int descriptor() const { return socket_.descriptor(); }
  bool open() const { return socket_.open(); }
  void Close() { socket_.Close(); }
  /// Returns the address of this end of the connection, as the other end sees it.
  std::string LocalHost() const { return socket_.LocalHost(); }

  /// Reads bytes that have arrived, for Next. Returns false at the end of the connection; Next then
  /// still returns the frames that came before.
  bool Fill();
  /// Returns the next frame; none if it is not complete yet. Throws ProtocolError for a frame that
  /// is empty or too long; the next call continues after that frame.
  std::optional<Frame> Next();

  /// Adds a message to the unsent bytes, and writes as many of them as the socket accepts.
  template <typename Message>
  void Send(const Message& message) {
    Queue(Encode(message));
  }
  /// Writes unsent bytes, as many as the socket accepts. Discards them if the connection is broken,
  /// which Fill then reports.
  void Flush();
  bool wants_to_write() const { return !outgoing_.empty(); }
  /// True if messages were discarded because the other end did not read for too long.
  bool overflowed() const { return overflowed_; }

 private:
  void Queue(const std::string& frame);

  TcpSocket socket_;
  size_t skip_ = 0;  // bytes of a frame that is too long
  bool overflowed_ = false;
  std::string incoming_;
  std::string outgoing_;
};

/// Returns a new descriptor (eventfd) by which one thread can wake another one that polls it.
/// Throws std::system_error.
int NewEvent();

/// Returns a timeout as the argument of poll(): at most an hour, because that is an int; -1 (no
/// limit) for a negative timeout.
int PollTime(std::chrono::milliseconds timeout);

}  // namespace onnxpar
