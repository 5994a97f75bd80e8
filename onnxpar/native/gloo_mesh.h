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

/// Returns the number of connections between two ranks that ONNXPAR_CONNECTIONS requests; 1 if it
/// is not set. Throws unless it is a number from 1 to 16.
int ConnectionsFromEnvironment();

/// Bytes to or from one rank. Gloo delivers a message to the receive with the same slot.
struct Message {
  int rank;
  uint64_t slot;
  void* data;
  size_t bytes;
};

/// The connections of one rank to all other ranks. A long message is sent in parts over all
/// connections to a rank.
class GlooMesh {
 public:
  GlooMesh(int rank, int size, Store& store, const Network& network,
           std::chrono::milliseconds timeout);

  /// Messages that are posted together and awaited together.
  class Flight {
   public:
    Flight(GlooMesh& mesh, const std::vector<Message>& sends, const std::vector<Message>& receives);
    ~Flight();
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;

    /// Returns when all messages have been sent and received; throws if a connection breaks, if a
    /// message does not arrive within the timeout, or after Abort.
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

  /// Makes the current flights, and all later ones, throw. Any thread may call it.
  void Abort();

  /// The rank for whose message this rank waits, or has waited until a failure; -1 if it waits for
  /// none.
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
