// Gloo connections to all other ranks, and interruptible messages on these connections.
#pragma once

#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <atomic>
#include <chrono>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "mesh_connections.h"

namespace onnxpar {

/// Returns the value of ONNXPAR_CONNECTIONS, the number of connections between each two ranks; 1 if
/// it is not set. Throws unless it is a number from 1 to 16.
int ConnectionsFromEnvironment();

/// Bytes that go to or come from one rank. A message is received by the receive with the same
/// `slot`, a hash of all values on which the two ranks must agree.
struct Message {
  int rank;
  uint64_t slot;
  void* data;
  size_t bytes;
};

/// The connections of one rank to all other ranks of the world. A long message is cut into parts,
/// which travel over all connections to the receiver.
class GlooMesh {
 public:
  GlooMesh(int rank, int size, Store& store, const Network& network,
           std::chrono::milliseconds timeout);

  /// Messages to and from several ranks that are posted together, by the constructor, and awaited
  /// together, by Wait.
  class Flight {
   public:
    Flight(GlooMesh& mesh, const std::vector<Message>& sends, const std::vector<Message>& receives);
    ~Flight();
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;

    /// Returns when all messages of the flight have been sent and received. Throws if a connection
    /// breaks, if a message does not arrive within the timeout, or after Abort.
    void Wait();

   private:
    friend class GlooMesh;

    struct Posted {
      int rank;
      bool outgoing;
      std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
    };

    void Post(const Message& message, bool outgoing);
    void PostPart(gloo::transport::Context& connections, const Message& part, bool outgoing);

    GlooMesh& mesh_;
    std::vector<Posted> posted_;
  };

  /// Makes the flights that are under way, and all later ones, throw. Any thread may call it.
  void Abort();

  /// Returns the rank whose message this rank waits for, or was waiting for when a flight failed;
  /// -1 if none.
  int awaited() const { return awaited_; }

 private:
  std::vector<std::shared_ptr<gloo::transport::Context>> contexts_;  // by number of connection
  const std::chrono::milliseconds timeout_;

  std::atomic<int> awaited_{-1};

  std::mutex mutex_;
  bool aborted_ = false;
  std::list<Flight*> flights_;
};

}  // namespace onnxpar
