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

/// The division of blocks into chunks.
struct Cut {
  size_t piece;  // bytes of a chunk of each block

  /// Returns the cut with the largest pieces for which there is room, if a step of a collective
  /// sends this number of pieces.
  static Cut WithRoom(const Links& links, size_t pieces);

  /// Returns the number of chunks of a block. An empty block is one empty chunk, so that its two
  /// members still exchange a message.
  size_t CountOf(const Block& block) const;
  /// Returns the bytes of a block in chunk number `chunk`; an empty range if the block has fewer
  /// chunks.
  Range RangeOf(const Block& block, size_t chunk) const;
};

/// A block that goes to, or comes from, the block's member.
struct Part {
  const void* base;  // the address from which the block's offset counts
  Block block;
  bool placed = true;  // false: there is no base; chunks are in scratch memory
};

/// Returns a part of `bytes` bytes whose only place is scratch memory.
inline Part Unplaced(int member, size_t bytes) { return {nullptr, Run(member, bytes), false}; }

/// Returns parts with the same base, without the parts of the member itself.
std::vector<Part> PartsAt(const void* base, const std::vector<Block>& blocks, const Call& call);

/// The transfers between this rank and the others in one phase of a collective. A message is a
/// chunk of all blocks of one member; these blocks must be neighbours in the list, in the same
/// order at both ends. At most two chunks may be posted and not yet waited for.
class Chunks {
 public:
  /// Prepares to send and to receive these parts, each of another member.
  ///
  /// A received unplaced part stays at the address that Arrived returns, in scratch memory or in
  /// its sender's memory, until Release; either all received parts are placed or none. An unplaced
  /// part to send must be written to the address that Departing returns, before Post.
  Chunks(Links& links, const Call& call, uint64_t phase, Cut cut, const std::vector<Part>& sends,
         const std::vector<Part>& receives, Scratch& scratch);

  /// The number of chunks of the largest block.
  size_t Count() const { return count_; }

  void Post(size_t chunk);
  void Wait(size_t chunk);

  /// Posts and waits for all chunks.
  void Move();
  /// Waits until all members have received the chunks of this rank. Without this wait, a member
  /// that has received all its chunks can complete a collective about which another member
  /// disagrees.
  void WaitUntilReceived();

  /// Returns the address of a chunk of received part number `part`, after a wait for the chunk.
  const char* Arrived(size_t part, size_t chunk) const {
    return receives_.parts[part].arrived[chunk % 2];
  }
  /// Returns the address at which to write a chunk of sent part number `part`.
  char* Departing(size_t part, size_t chunk) const { return Slot(sends_.parts[part], chunk); }
  /// Returns the memory of a chunk of received unplaced parts to the senders of the parts.
  void Release(size_t chunk);

 private:
  struct Piece : Part {
    size_t slot;  // offset into scratch memory, if its lane is staged or it is unplaced
    const char* arrived[2];
  };
  /// The parts of one member.
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
