// Accepts connections from processes that have the key (the shared secret) of the world, and drops
// all others.
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

/// A listening socket, and the accepted connections whose handshakes are not yet done. Unknown
/// processes can neither block it nor use up its descriptors: a handshake may take 5 seconds, and
/// with 128 handshakes under way, a further connection replaces the oldest.
///
/// The owner polls the acceptor's descriptors together with its own: Watch, poll, Advance, then
/// Next until there is no connection.
class Acceptor {
 public:
  using Clock = std::chrono::steady_clock;

  /// Listens on `address`; if its port is 0, takes a free port and stores it there. `purpose` is
  /// the service that connecting processes must name in the handshake, e.g. "hub". Throws
  /// std::system_error if it cannot listen, or std::runtime_error as CheckExposure does.
  Acceptor(Address* address, Credentials credentials, std::string purpose);
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  /// Appends to `descriptors` the descriptors and events for which the acceptor waits.
  void Watch(std::vector<pollfd>* descriptors) const;
  /// Accepts connections and continues handshakes after a poll. `ready` points to the entries that
  /// the last Watch appended. Call it after each poll, even if no entry is ready, because it also
  /// ends handshakes that take too long.
  void Advance(const pollfd* ready);
  /// Returns the latest time at which Advance must be called again.
  Clock::time_point deadline() const;
  /// Removes and returns a connection whose other end has proved the key; none if there is no such
  /// connection now.
  std::optional<Accepted> Next();
  /// True if the last attempt to accept failed because this process has no descriptor left.
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
