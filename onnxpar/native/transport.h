// The interface of implementations that move bytes between ranks; message_transport.h has one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "block.h"
#include "reduce.h"

namespace onnxpar {

/// A transfer failed; the message names the other rank, e.g. "rank 2 (connection reset)".
class TransportError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One run of a collective.
struct Call {
  /// The members' world ranks in group order.
  const std::vector<int>& ranks;
  /// This rank's index in `ranks`.
  int me;
  /// A hash that is equal on two members if and only if they agree on the collective, its operands,
  /// and the number of collectives that the group ran before. Messages carry the key, so that
  /// members that disagree never exchange a byte.
  uint64_t key;

  int size() const { return static_cast<int>(ranks.size()); }
};

/// The bytes and rounds that a rank exchanged with ranks of other hosts.
struct Crossing {
  int rounds = 0;    // of messages; each round waits for the round before it
  size_t bytes = 0;  // sent or received in all rounds, whichever is more
};

/// Runs the collectives of one rank, one at a time. Every method blocks until its output is
/// complete and its input may be overwritten, or throws a TransportError. A list of blocks has at
/// most one block per member; a block's member may be this rank.
///
/// Two members for whom a collective lists a block exchange a message even if the block is empty,
/// so that no member completes a collective about which another one disagrees.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Reduces `elements` elements over the members; `out` may be `in`.
  virtual void AllReduce(const Call& call, const Reduction& reduction, const void* in, void* out,
                         size_t elements) = 0;

  /// Reduces block i of every member's `in` into member i's `out`.
  virtual void ReduceScatter(const Call& call, const Reduction& reduction, const void* in,
                             const std::vector<Block>& blocks, void* out) = 0;

  /// Copies the `in` of each member i to `blocks[i]` of every member's `out`.
  virtual void AllGather(const Call& call, const void* in, void* out,
                         const std::vector<Block>& blocks) = 0;

  /// Copies member `root`'s `data` to every member's `data`.
  virtual void Broadcast(const Call& call, int root, void* data, size_t bytes) = 0;

  /// Sends each block of `in` to its member, and receives each block of `out` from its member.
  virtual void Exchange(const Call& call, const void* in, const std::vector<Block>& sends,
                        void* out, const std::vector<Block>& receives) = 0;

  /// Makes the current collective and every later one throw. Any thread may call it.
  virtual void Abort() = 0;

  /// Returns what the last collective of this rank exchanged with other hosts.
  virtual Crossing LastCrossing() const = 0;

  /// Returns the rank of the world for which the collective that runs waits, or has failed; -1 if
  /// there is none. Any thread may call it.
  virtual int Awaited() const = 0;

  /// True if messages to this rank of the world go through memory that both ranks share.
  virtual bool SharesMemoryWith(int rank) const = 0;
};

}  // namespace onnxpar
