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

/// Returns the address `offset` bytes after `base`. The result is not const, because Gloo takes no
/// pointers to const even for data that it only sends.
inline void* At(const void* base, size_t offset) {
  return static_cast<char*>(const_cast<void*>(base)) + offset;
}

/// The division of blocks into chunks of at most `piece` bytes, so that the scratch memory of a
/// transfer is bounded, and one chunk can travel while another is reduced.
struct Cut {
  size_t piece;  // bytes of a chunk of each block

  /// Returns the cut with the largest chunks that fit the shared memory of `links`, if one step of
  /// a collective sends `pieces` chunks.
  static Cut WithRoom(const Links& links, size_t pieces);

  /// Returns the number of chunks of a block. An empty block counts as one empty chunk, so that
  /// sender and receiver still exchange a message.
  size_t CountOf(const Block& block) const;
  /// Returns the bytes of a block that are in chunk number `chunk`; an empty range if the block has
  /// fewer chunks.
  Range RangeOf(const Block& block, size_t chunk) const;
};

/// A block that this rank sends to, or receives from, member `block.member` of the group. A placed
/// part lies in the caller's tensor; an unplaced part exists only chunk by chunk, in scratch
/// memory.
struct Part {
  const void* base;  // the address from which the block's offset counts
  Block block;
  bool placed = true;  // false: there is no base; chunks are in scratch memory
};

/// Returns an unplaced part of `bytes` bytes, exchanged with `member`.
inline Part Unplaced(int member, size_t bytes) { return {nullptr, Run(member, bytes), false}; }

/// Returns these blocks of the tensor at `base` as parts, without the blocks of this rank itself.
std::vector<Part> PartsAt(const void* base, const std::vector<Block>& blocks, const Call& call);

/// The transfers between this rank and the other members in one phase of a collective (e.g. the
/// phase inside a host). Chunk number i of all parts that go to the same member is one message;
/// these parts must be neighbours in the list, in the same order at both ends.
///
/// The caller posts chunk i, and later waits for it; at most two chunks may be posted and not yet
/// waited for.
class Chunks {
 public:
  /// Prepares to send and receive these parts, each of which belongs to another member. Messages of
  /// different phases never match.
  ///
  /// An unplaced part to send must be written, chunk by chunk, to the address that Departing
  /// returns, before Post. A received unplaced part is at the address that Arrived returns (in
  /// scratch memory, or in the sender's shared memory) until Release. Received parts are either all
  /// placed or all unplaced.
  Chunks(Links& links, const Call& call, uint64_t phase, Cut cut, const std::vector<Part>& sends,
         const std::vector<Part>& receives, Scratch& scratch);

  /// Returns the number of chunks of the largest block, so the number of times to call Post and
  /// Wait.
  size_t Count() const { return count_; }

  void Post(size_t chunk);
  void Wait(size_t chunk);

  /// Posts all chunks and waits for them. All parts must be placed.
  void Move();
  /// Waits until all members on this host have read the chunks of this rank. Without it, a rank
  /// could complete a collective about which another member disagrees.
  void WaitUntilReceived();

  /// Returns the address of a chunk of received part number `part`; call Wait for the chunk first.
  const char* Arrived(size_t part, size_t chunk) const {
    return receives_.parts[part].arrived[chunk % 2];
  }
  /// Returns the address to which to write a chunk of the unplaced sent part number `part`.
  char* Departing(size_t part, size_t chunk) const { return Slot(sends_.parts[part], chunk); }
  /// Tells the senders that this rank needs a chunk of its received unplaced parts no more, so that
  /// they can reuse the memory.
  void Release(size_t chunk);

 private:
  struct Piece : Part {
    size_t slot;  // offset into scratch memory, if its lane is staged or it is unplaced
    const char* arrived[2];
  };
  /// The parts that are exchanged with one member; chunk i of all of them is one message.
  struct Lane {
    int member;
    size_t begin, end;  // in the list of parts
    size_t count;       // of chunks
    bool shared;        // through shared memory
    bool staged;        // in scratch memory
  };
  struct Lanes {
    std::vector<Piece> parts;
    std::vector<Lane> lanes;
  };

  Lanes LanesOf(const std::vector<Part>& parts, bool outgoing);
  void Stage(Lanes& all, Lane& lane, bool outgoing);
  void CountCrossing() const;
  uint64_t SlotOf(size_t bytes, size_t chunk) const;
  char* Slot(const Piece& piece, size_t chunk) const;
  size_t BytesOf(const Lanes& all, const Lane& lane, size_t chunk) const;
  bool Alike(const Lane& a, const Lane& b) const;
  void Pack(const Lane& lane, size_t chunk, char* memory) const;
  void Unpack(const Lane& lane, size_t chunk, const char* memory);
  int RankOf(const Lane& lane) const { return call_.ranks[lane.member]; }
  void PostShared(size_t chunk);
  void PostGloo(size_t chunk);

  Links& links_;
  const Call& call_;
  const uint64_t key_;
  const Cut cut_;
  size_t count_ = 0;
  size_t staged_bytes_ = 0;
  Lanes sends_;
  Lanes receives_;
  char* const scratch_;
  std::unique_ptr<GlooMesh::Flight> flights_[2];
};

}  // namespace onnxpar
