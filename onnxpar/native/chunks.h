// Sends and receives blocks of any size in chunks, with scratch memory of bounded size.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "block.h"
#include "links.h"
#include "transport.h"

namespace onnxpar {

/// Memory that is kept and reused between calls.
class Scratch {
 public:
  char* Get(size_t bytes) {
    if (bytes > size_) {
      memory_.reset(new char[bytes]);
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<char[]> memory_;
  size_t size_ = 0;
};

/// Returns the address of a byte. Not const, because Gloo takes no pointers to const even for data
/// that it only sends.
inline void* At(const void* base, size_t offset) {
  return static_cast<char*>(const_cast<void*>(base)) + offset;
}

/// The transfers between this rank and the others in one phase of a collective. At most two chunks
/// may be posted and not yet waited for. Blocks from this rank to itself are skipped.
class Chunks {
 public:
  enum Arrival { kToOut, kStays };

  /// Prepares to send blocks of `in` and to receive blocks of `out`. With kStays, received chunks
  /// are not copied to `out`: they stay where Arrived says, in scratch memory or in that of their
  /// sender, until Release. The blocks must outlive this object.
  Chunks(Links& links, const Call& call, uint64_t phase, const void* in,
         const std::vector<Block>& sends, void* out, const std::vector<Block>& receives,
         Arrival arrival, Scratch& scratch);

  /// The number of chunks of the largest block.
  size_t Count() const { return count_; }

  /// Returns the bytes of a block that chunk number `chunk` has; an empty range if the block has
  /// fewer chunks.
  Range RangeOf(const Block& block, size_t chunk) const;

  void Post(size_t chunk);
  void Wait(size_t chunk);

  /// Posts and waits for all chunks.
  void Move();
  /// Waits until all members have received what this rank has sent. Without it, a member can end a
  /// collective about which another one disagrees, if it has received all that it expects.
  void WaitUntilReceived();

  /// Returns the address of a chunk of `receives[index]` that was waited for, with kStays.
  const char* Arrived(size_t index, size_t chunk) const {
    return receives_[index].arrived[chunk % 2];
  }
  /// Returns scratch memory for a chunk of this rank's own block, with kStays.
  char* Own(size_t chunk) const { return Slot(receives_[call_.me], chunk); }
  /// Gives the memory of a chunk back to its senders, with kStays.
  void Release(size_t chunk);

 private:
  struct Lane {
    const Block* block;
    bool shared;  // through shared memory
    bool staged;  // in scratch memory
    size_t slot;  // offset into scratch memory
    const char* arrived[2];
  };

  std::vector<Lane> LanesOf(const std::vector<Block>& blocks, bool stays);
  size_t CountOf(const Block& block) const;
  bool Moves(const Lane& lane, size_t chunk) const;
  int RankOf(const Lane& lane) const { return call_.ranks[lane.block->member]; }
  uint64_t SlotOf(const Range& range, size_t chunk) const;
  char* Slot(const Lane& lane, size_t chunk) const;
  void PostShared(size_t chunk);
  void PostGloo(size_t chunk);

  Links& links_;
  const Call& call_;
  const uint64_t key_;
  const void* const in_;
  void* const out_;
  const bool stays_;
  const size_t piece_;  // bytes of a chunk
  size_t count_ = 0;
  size_t staged_bytes_ = 0;
  const std::vector<Lane> sends_;
  std::vector<Lane> receives_;
  char* const scratch_;
  std::unique_ptr<GlooMesh::Flight> flights_[2];
};

}  // namespace onnxpar
