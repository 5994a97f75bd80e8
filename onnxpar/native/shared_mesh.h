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

/// The ranks on this host, and the messages that this rank exchanges with them. A rank writes a
/// message once into its own segment, and announces it to each reader in a cell (see Segment);
/// readers read it there. Messages between two ranks arrive in the order in which they were sent.
///
/// One thread sends and receives; any thread may call Abort.
class SharedMesh {
 public:
  /// Finds the ranks on this host, through `store`; all ranks of the world must call it. If
  /// `offered` is false, this rank shares no memory. Throws if a rank on this host does not take
  /// part within `timeout`, or if limits of the process or the machine do not allow the memory.
  SharedMesh(int rank, int size, Store& store, bool offered, std::chrono::milliseconds timeout);

  /// True if messages to this rank can go through shared memory, because it is on this host.
  bool Reaches(int rank) const { return segments_[rank].mapped(); }
  /// True if every two ranks of the world share memory.
  bool everyone() const { return everyone_; }
  /// Returns the number of each rank's host; all ranks with the same number share memory.
  const std::vector<int>& hosts() const { return hosts_; }

  /// Sends one message of at most MaxBytes bytes to all of `readers`; fill(memory) writes it.
  /// `slot` is a hash of all values on which sender and readers must agree. Waits for readers to
  /// release earlier messages if there is no room.
  template <typename Fill>
  void Send(const std::vector<int>& readers, uint64_t slot, size_t bytes, const Fill& fill) {
    char small[kInlineBytes];
    char* const memory = bytes <= kInlineBytes ? small : Reserve(bytes);
    fill(memory);
    for (int reader : readers) Announce(reader, slot, memory, bytes);
  }

  /// Waits for the next message of `rank`, and returns its address in that rank's segment, where it
  /// stays until Release. The message must have this slot and size. Throws a TransportError if it
  /// does not come within the timeout, or after Abort.
  const char* Receive(int rank, uint64_t slot, size_t bytes);
  /// Tells `rank` that this rank has read the oldest message from it that is not released yet, so
  /// that its memory can be reused.
  void Release(int rank);
  /// Waits until `rank` has released all messages that this rank has sent to it.
  void WaitUntilReleased(int rank);

  /// Makes Send, Receive and WaitUntilReleased throw, those that wait now and all later ones.
  void Abort();

  /// Returns the rank for which this rank waits, or was waiting when it failed; -1 if none.
  int awaited() const { return awaited_; }

  /// Returns the most bytes that a piece of a message may have, the same on all ranks, if a step of
  /// a collective sends `pieces` pieces. Then the pieces of three steps fit in the segment, so a
  /// rank can go on while its last steps are not yet released.
  size_t MaxBytes(size_t pieces) const;

 private:
  /// The bytes `begin` to `end` - 1 of this rank's area, which hold one message until all its
  /// readers have released it.
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

  /// Waits until has_come(value of word) is true. `word` is in the segment of `rank`, which changes
  /// it.
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
