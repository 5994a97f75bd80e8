// The memory in which one rank leaves messages for the other ranks of its host.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace onnxpar {

/// A rank may have announced this many messages to another one that the other one has not released.
constexpr uint32_t kCells = 8;
/// A message of at most this many bytes is in its cell: it arrives with one cache line.
constexpr size_t kInlineBytes = 40;

/// The announcement of a message, in one cache line.
struct alignas(64) Cell {
  std::atomic<uint32_t> stamp;  // the message's number among those to its reader, from 1
  uint32_t bytes;
  uint64_t slot;
  uint64_t offset;  // of longer messages, in the sender's area
  char data[kInlineBytes];
};

/// The words that a rank writes for one other rank.
struct Lane {
  Cell cells[kCells];
  /// The number of the other rank's messages that this rank has released.
  alignas(64) std::atomic<uint32_t> released;
  /// Not 0 while this rank may sleep until the other rank changes a stamp or `released`.
  std::atomic<uint32_t> sleeping;
};

static_assert(sizeof(Cell) == 64 && std::atomic<uint32_t>::is_always_lock_free);

/// Memory that its own rank can read and write, and that other ranks can only read: a lane for each
/// rank of the world, and an area for the data of messages.
class Segment {
 public:
  /// Creates this rank's segment. Throws if the limits of this process or the memory do not allow
  /// it.
  static Segment Create(size_t lanes, size_t area_bytes);
  /// Maps the segment of another rank, and takes over the descriptor. Throws unless the segment has
  /// this size, which its rank cannot change any more.
  static Segment Map(int descriptor, size_t lanes, size_t area_bytes);

  Segment() = default;
  ~Segment();
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;

  bool mapped() const { return memory_ != nullptr; }
  int descriptor() const { return descriptor_; }
  Lane& lane(int rank) const { return static_cast<Lane*>(memory_)[rank]; }
  char* area() const { return static_cast<char*>(memory_) + lanes_ * sizeof(Lane); }
  size_t area_bytes() const { return bytes_ - lanes_ * sizeof(Lane); }

 private:
  Segment(int descriptor, size_t lanes, size_t area_bytes)
      : descriptor_(descriptor), lanes_(lanes), bytes_(lanes * sizeof(Lane) + area_bytes) {}

  void MapMemory(int protection);

  int descriptor_ = -1;
  size_t lanes_ = 0;
  size_t bytes_ = 0;
  void* memory_ = nullptr;
};

}  // namespace onnxpar
