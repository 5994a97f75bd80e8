// The memory in which one rank leaves messages for the other ranks on its host.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace onnxpar {

/// The most messages from one rank to another that are announced and not yet released.
constexpr uint32_t kCells = 8;
/// The most bytes of a message that lies in its cell itself, so that it arrives with one cache
/// line.
constexpr size_t kInlineBytes = 40;

/// The announcement of one message to one reader, in one cache line. The reader waits for its
/// stamp.
struct alignas(64) Cell {
  std::atomic<uint32_t> stamp;  // the message's number among those to its reader, from 1
  uint32_t bytes;
  uint64_t slot;
  uint64_t offset;  // of longer messages, in the sender's area
  char data[kInlineBytes];
};

/// What a rank tells one other rank: the announcements of its messages, and its progress as a
/// reader.
struct Lane {
  Cell cells[kCells];
  /// How many messages of the other rank this rank has released.
  alignas(64) std::atomic<uint32_t> released;
  /// 1 while this rank may sleep until the other rank changes a stamp or `released`; else 0.
  std::atomic<uint32_t> sleeping;
};

static_assert(sizeof(Cell) == 64 && std::atomic<uint32_t>::is_always_lock_free);

/// Memory that one rank can read and write, and other ranks can only read: a lane for each rank of
/// the world, and then an area for the data of messages.
class Segment {
 public:
  /// Returns a new segment of this rank, for a world of `lanes` ranks. Throws if the limits of this
  /// process or the memory of the machine do not allow it.
  static Segment Create(size_t lanes, size_t area_bytes);
  /// Returns the segment of another rank, which passed `descriptor`; the result owns the
  /// descriptor. Throws unless the segment has this size and its rank cannot change it any more.
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
