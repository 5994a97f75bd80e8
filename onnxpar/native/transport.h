// The interface that moves bytes between ranks. Gloo is the first implementation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "block.h"
#include "reduce.h"

namespace onnxpar {

/// Bytes could not be moved, e.g. "rank 2 (connection reset)".
class TransportError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One collective in flight.
struct Call {
  /// The members' world ranks in group order.
  const std::vector<int>& ranks;
  /// This rank's place among them.
  int me;
  /// Equal on two members if and only if they agree on which collective runs, on what, and when.
  /// Messages carry it, so that members who disagree never exchange a byte.
  uint64_t key;

  int size() const { return static_cast<int>(ranks.size()); }
};

/// The collectives of one rank, one at a time. Every call blocks until its output is complete and
/// its input may be overwritten, or throws a TransportError. A list of blocks names each member at
/// most once; the member may be this rank.
///
/// Every two members that a call pairs exchange a message, even an empty one, so that no member
/// passes a collective on which another disagrees with it.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Reduces `elements` elements; `out` may be `in`.
  virtual void AllReduce(const Call& call, const Reduction& reduction, const void* in, void* out,
                         size_t elements) = 0;

  /// Reduces `blocks[i]` of `in` into member i's `out`.
  virtual void ReduceScatter(const Call& call, const Reduction& reduction, const void* in,
                             const std::vector<Block>& blocks, void* out) = 0;

  /// Gives each member's `in` to all; `blocks[i]` of `out` takes member i's.
  virtual void AllGather(const Call& call, const void* in, void* out,
                         const std::vector<Block>& blocks) = 0;

  /// Copies member `root`'s `data` to every member's `data`.
  virtual void Broadcast(const Call& call, int root, void* data, size_t bytes) = 0;

  /// Sends blocks of `in` and receives blocks of `out`.
  virtual void Exchange(const Call& call, const void* in, const std::vector<Block>& sends,
                        void* out, const std::vector<Block>& receives) = 0;

  /// Makes the call in flight, and every later one, throw. Any thread may call it.
  virtual void Abort() = 0;
};

}  // namespace onnxpar
