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
/// The same, of a connection that has not said who it is.
constexpr size_t kMaxHello = 4096;

/// A connection; closed on destruction. It never blocks, and holds one frame that comes and twice
/// the longest frame that goes at most.
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

  /// Reads some of what has come. False at the end of the connection; frames that came before
  /// remain.
  bool Fill();
  /// The next complete frame. Throws ProtocolError on one that is too long or empty; the next call
  /// goes on behind it.
  std::optional<Frame> Next();

  /// Queues a message and writes as much as the socket takes.
  template <typename Message>
  void Send(const Message& message) {
    Queue(Encode(message));
  }
  /// Writes what is queued, if the connection is not broken; that Fill tells.
  void Flush();
  bool wants_to_write() const { return !outgoing_.empty(); }
  /// Whether the other end has not read for so long that frames were lost.
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

/// Whether no other host can reach it. Throws where it cannot be resolved.
bool IsLoopback(const Address& address);

/// Listens on `address`, on any free port if it names none, and sets the port. Throws
/// std::system_error.
int Listen(Address* address);

/// Wakes a thread that polls it. Throws std::system_error.
int NewEvent();

/// The name of this host.
std::string HostName();

/// Connects; a closed connection if nobody answers. Throws std::system_error where this process
/// can have no socket.
Connection Connect(const Address& address, std::chrono::milliseconds timeout);

/// Waits, at most an hour at a time, as poll() counts in int.
int PollTime(std::chrono::milliseconds timeout);

/// Why a process can open no more sockets and files, and what to do.
std::string OutOfDescriptors();

}  // namespace onnxpar
