// Sends and receives blocks of any size in chunks, with scratch memory of bounded size.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "block.h"
#include "gloo_mesh.h"
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
  enum Staging { kWhereStrided, kAlways };

  /// Prepares to send blocks of `in` and to receive blocks of `out`. With kAlways, received chunks
  /// go to scratch memory; with kWhereStrided, only chunks of blocks that are not contiguous do.
  /// They are then copied to `out`, unless it is null. The blocks must outlive this object.
  Chunks(GlooMesh& mesh, const Call& call, uint64_t phase, const void* in,
         const std::vector<Block>& sends, void* out, const std::vector<Block>& receives,
         Staging staging, Scratch& scratch);

  /// The number of chunks of the largest block.
  size_t Count() const { return count_; }

  /// Returns the bytes of a block that chunk number `chunk` has; an empty range if the block has
  /// fewer chunks.
  static Range RangeOf(const Block& block, size_t chunk);

  void Post(size_t chunk);
  void Wait(size_t chunk);

  /// Posts and waits for all chunks.
  void Move();

  /// Returns the address in scratch memory of a chunk of `receives[index]`.
  char* Staged(size_t index, size_t chunk) const;

 private:
  struct Lane {
    const Block* block;
    bool staged;
    size_t slot;  // offset into scratch memory
  };

  std::vector<Lane> LanesOf(const std::vector<Block>& blocks, Staging staging);
  bool Moves(const Lane& lane, size_t chunk) const;
  char* Slot(const Lane& lane, size_t chunk) const;

  GlooMesh& mesh_;
  const Call& call_;
  const uint64_t key_;
  const void* const in_;
  void* const out_;
  size_t count_ = 0;
  size_t staged_bytes_ = 0;
  const std::vector<Lane> sends_;
  const std::vector<Lane> receives_;
  char* const scratch_;
  std::unique_ptr<GlooMesh::Flight> flights_[2];
};

}  // namespace onnxpar
