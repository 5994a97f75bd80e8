// Blocks of any size, moved chunk by chunk through scratch memory of bounded size.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "block.h"
#include "gloo_mesh.h"
#include "transport.h"

namespace onnxpar {

/// Memory that is kept between calls.
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

/// The address of a byte. Gloo takes no pointers to const, though it only reads what it sends.
inline void* At(const void* base, size_t offset) {
  return static_cast<char*>(const_cast<void*>(base)) + offset;
}

/// The transfers between this rank and the others in one phase of a collective. Two chunks may be
/// posted at a time. Blocks from this rank to itself are skipped.
class Chunks {
 public:
  enum Staging { kWhereStrided, kAlways };

  /// Sends blocks of `in` and receives blocks of `out`. Received chunks stay in scratch memory if
  /// `staging` is kAlways, otherwise they end up in `out`. The blocks must outlive this object.
  Chunks(GlooMesh& mesh, const Call& call, uint64_t phase, const void* in,
         const std::vector<Block>& sends, void* out, const std::vector<Block>& receives,
         Staging staging, Scratch& scratch);

  /// The number of chunks of the largest block.
  size_t Count() const { return count_; }

  /// The bytes of a block that are its chunk `chunk`; none if it has fewer chunks.
  static Range RangeOf(const Block& block, size_t chunk);

  void Post(size_t chunk);
  void Wait(size_t chunk);

  /// Posts and waits for all chunks.
  void Move();

  /// The staged bytes of a chunk of `receives[index]`.
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
