// Accepts connections from processes that have the key of the world, and drops all others.
#pragma once

#include <poll.h>

#include <chrono>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "handshake.h"

namespace onnxpar {

/// A connection whose other end has proved that it has the key.
struct Accepted {
  TcpSocket socket;
  std::string identity;  // the name that the other end gives itself
};

/// A socket that listens, and the connections whose handshakes are under way. Strangers cost few
/// descriptors, little memory and no waiting: each handshake has 5 seconds, and a further
/// connection replaces the oldest of 128. The owner polls the acceptor together with other
/// descriptors.
class Acceptor {
 public:
  using Clock = std::chrono::steady_clock;

  /// Listens on `address`, and sets the address's port if it is 0. Throws std::system_error, or
  /// std::runtime_error as CheckExposure does.
  Acceptor(Address* address, Credentials credentials, std::string purpose);
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  /// Adds the descriptors to wait for.
  void Watch(std::vector<pollfd>* descriptors) const;
  /// Continues the handshakes after a poll; `ready` are the descriptors that the last Watch added.
  /// Must be called after each poll, even if none is ready.
  void Advance(const pollfd* ready);
  /// The latest time for the next call of Advance.
  Clock::time_point deadline() const;
  /// Returns a connection that has proved the key, if there is one.
  std::optional<Accepted> Next();
  /// True if this process had no descriptor left for the last connection.
  bool is_starved() const { return is_starved_; }

 private:
  struct Stranger {
    Handshake handshake;
    Clock::time_point until;
  };

  void AcceptAll();
  bool Goes(Handshake& handshake);

  const Credentials credentials_;
  const std::string purpose_;
  int listener_ = -1;
  std::list<Stranger> strangers_;  // oldest first
  std::list<Accepted> accepted_;
  bool is_starved_ = false;
  Clock::time_point accept_from_;  // when to accept connections again
};

}  // namespace onnxpar
