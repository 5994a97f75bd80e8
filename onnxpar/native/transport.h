// The interface of a transport, which moves the bytes of collectives between ranks;
// message_transport.h has an implementation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "block.h"
#include "reduce.h"

namespace onnxpar {

/// The exception for a transfer that failed. Its message names the other rank, e.g. "rank 2
/// (connection reset)".
class TransportError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One run of a collective, as one of its members sees it.
struct Call {
  /// The ranks of the members in the world, in group order.
  const std::vector<int>& ranks;
  /// This rank's index in `ranks`.
  int me;
  /// A hash of everything on which members must agree: the collective, its parameters, types and
  /// shapes, and how many collectives the group has run before. All messages carry the key, so
  /// members that disagree never receive each other's bytes.
  uint64_t key;

  int size() const { return static_cast<int>(ranks.size()); }
};

/// How many bytes, in how many rounds of messages, a rank exchanged with ranks of other hosts.
struct Crossing {
  int rounds = 0;    // of messages; each round waits for the round before it
  size_t bytes = 0;  // sent or received in all rounds, whichever is more
};

/// Runs the collectives of one rank, one at a time. Every method blocks until its output is
/// complete and its input may be overwritten, or throws a TransportError. Lists of blocks have at
/// most one block per member, which may be this rank itself.
///
/// If a collective lists a block for two members, they exchange a message even if the block is
/// empty, so that no member completes a collective about which another one disagrees.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Writes to every member's `out` the reduction of all members' `in`, of `elements` elements.
  /// `out` may be `in`.
  virtual void AllReduce(const Call& call, const Reduction& reduction, const void* in, void* out,
                         size_t elements) = 0;

  /// Writes to the `out` of member i, contiguously, the reduction of block i of all members' `in`.
  virtual void ReduceScatter(const Call& call, const Reduction& reduction, const void* in,
                             const std::vector<Block>& blocks, void* out) = 0;

  /// Copies the contiguous `in` of member i to blocks[i] of every member's `out`, for each i.
  virtual void AllGather(const Call& call, const void* in, void* out,
                         const std::vector<Block>& blocks) = 0;

  /// Copies the `bytes` bytes at `data` of member `root` to the `data` of every member.
  virtual void Broadcast(const Call& call, int root, void* data, size_t bytes) = 0;

  /// Sends each block of `sends`, a part of `in`, to the block's member, and receives each block of
  /// `receives`, a part of `out`, from the block's member.
  virtual void Exchange(const Call& call, const void* in, const std::vector<Block>& sends,
                        void* out, const std::vector<Block>& receives) = 0;

  /// Makes the current collective and all later ones throw. Any thread may call it.
  virtual void Abort() = 0;

  /// Returns what this rank's last collective exchanged with other hosts.
  virtual Crossing LastCrossing() const = 0;

  /// Returns the rank of the world for whose message the current collective waits, or was waiting
  /// when it failed; -1 if none. Any thread may call it.
  virtual int Awaited() const = 0;

  /// True if messages to this rank of the world go through memory that both ranks share.
  virtual bool SharesMemoryWith(int rank) const = 0;
};

}  // namespace onnxpar
