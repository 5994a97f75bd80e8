// Messages through shared memory between the ranks of one host.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <vector>

#include "local_socket.h"
#include "shared_segment.h"
#include "store.h"

namespace onnxpar {

/// The ranks of this host, and the messages that this rank exchanges with them. A rank writes a
/// message into its own segment, once for all its readers, and announces it to each in a cell;
/// readers read the message there. Between two ranks, messages arrive in the order in which they
/// were sent.
///
/// One thread sends and receives; any thread may call Abort.
class SharedMesh {
 public:
  /// Finds the ranks of this host; all ranks of the world must call it. If `offered` is false, this
  /// rank uses no shared memory. Throws if a rank on this host does not take part in time, or if
  /// limits do not allow the memory.
  SharedMesh(int rank, int size, Store& store, bool offered, std::chrono::milliseconds timeout);

  /// True if messages to this rank can go through shared memory.
  bool Reaches(int rank) const { return segments_[rank].mapped(); }
  /// True if all ranks of the world reach each other.
  bool everyone() const { return everyone_; }
  /// The host of each rank of the world: all ranks of a host reach each other.
  const std::vector<int>& hosts() const { return hosts_; }

  /// Sends a message to each of `readers`; fill(memory) writes it. MaxBytes says how large it may
  /// be. If there is no room, waits until readers have released earlier messages.
  template <typename Fill>
  void Send(const std::vector<int>& readers, uint64_t slot, size_t bytes, const Fill& fill) {
    char small[kInlineBytes];
    char* const memory = bytes <= kInlineBytes ? small : Reserve(bytes);
    fill(memory);
    for (int reader : readers) Announce(reader, slot, memory, bytes);
  }

  /// Returns the address of the next message of `rank`, in that rank's segment; the message must
  /// have this slot and size. It stays there until Release. Throws a TransportError if the message
  /// does not come within the timeout, or after Abort.
  const char* Receive(int rank, uint64_t slot, size_t bytes);
  /// Returns the memory of the first received message of `rank` to this rank.
  void Release(int rank);
  /// Waits until `rank` has released all messages of this rank.
  void WaitUntilReleased(int rank);

  /// Makes Send, Receive and WaitUntilReleased throw, now and later.
  void Abort();

  /// The rank for which this rank waits, or has waited until a failure; -1 if it waits for none.
  int awaited() const { return awaited_; }

  /// The largest number of bytes of a piece of a message, if a collective sends `pieces` pieces in
  /// each of its steps, and continues while the pieces of three steps are unreleased. Equal on all
  /// ranks.
  size_t MaxBytes(size_t pieces) const;

 private:
  /// The bytes of the area from `begin` to before `end`, in use until their readers have released
  /// the message.
  struct Region {
    size_t begin, end;
    std::vector<std::pair<int, uint32_t>> readers;  // with the number of the message
  };
  struct Peer {
    uint32_t sent = 0;
    uint32_t received = 0;
    uint32_t released = 0;
  };

  char* Reserve(size_t bytes);
  void FreeOldest();
  void Announce(int reader, uint64_t slot, const char* data, size_t bytes);
  void Publish(int rank, std::atomic<uint32_t>& word, uint32_t value);

  /// Waits until has_come(word's value) is true. `word` belongs to `rank`.
  template <typename HasCome>
  void Wait(int rank, const std::atomic<uint32_t>& word, const HasCome& has_come);
  [[noreturn]] void Throw(int rank) const;

  const int rank_;
  const std::chrono::milliseconds timeout_;
  Segment own_;
  std::vector<Segment> segments_;  // of the other ranks; not mapped for ranks on other hosts
  std::vector<LocalSocket> sockets_;
  bool everyone_ = false;
  std::vector<int> hosts_;
  bool spins_ = false;
  std::vector<Peer> peers_;
  std::deque<Region> regions_;  // oldest first
  std::atomic<bool> aborted_{false};
  std::atomic<int> awaited_{-1};
};

}  // namespace onnxpar
