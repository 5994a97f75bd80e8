#include "shared_mesh.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "futex.h"
#include "shared_handshake.h"
#include "transport.h"

namespace onnxpar {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// The size of a segment's area for messages in small worlds. In larger worlds, the area is larger,
/// so that messages of kLeastBytes have room.
constexpr size_t kAreaBytes = 4 << 20;
constexpr size_t kLeastBytes = 64 << 10;
/// The size of a piece of a message is a multiple of this, so that the next piece is aligned.
constexpr size_t kPage = 4 << 10;
/// The unit in which room in the area is reserved, so that all elements are aligned.
constexpr size_t kAlignment = 64;
/// How long to sleep before the next check whether the other rank has ended. The hub would report
/// this at once, but the process that serves the hub may have ended, too.
constexpr milliseconds kNap{50};

/// Returns the number of pieces for which an area has room if a step has `step` pieces: those of
/// three steps, and more because a message is not divided at the end of the area.
size_t PiecesInArea(size_t step) { return 4 * step + 4; }

size_t AreaOf(int size) {
  return std::max(kAreaBytes, PiecesInArea(static_cast<size_t>(size)) * kLeastBytes);
}

}  // namespace

SharedMesh::SharedMesh(int rank, int size, Store& store, bool offered, milliseconds timeout)
    : rank_(rank), timeout_(timeout), peers_(size) {
  if (offered) own_ = Segment::Create(size, AreaOf(size));
  LocalRanks local = MeetLocalRanks(rank, size, store, own_, offered, timeout);
  segments_ = std::move(local.segments);
  sockets_ = std::move(local.sockets);
  everyone_ = local.everyone;
  hosts_ = std::move(local.hosts);
  spins_ = local.count <= CPU_COUNT(&local.cores);
}

size_t SharedMesh::MaxBytes(size_t pieces) const {
  const size_t room = AreaOf(static_cast<int>(peers_.size())) / PiecesInArea(pieces);
  return std::max(kAlignment,
                  room >= kPage ? room / kPage * kPage : room / kAlignment * kAlignment);
}

/// Reserves room in this rank's area and returns its address: after the newest message, or if that
/// is too near the end, at the start. Waits until readers have released the messages that lie
/// there.
char* SharedMesh::Reserve(size_t bytes) {
  const size_t needed = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  size_t begin = regions_.empty() ? 0 : regions_.back().end;
  if (begin + needed > own_.area_bytes()) begin = 0;
  const auto in_the_way = [&](const Region& region) {
    return region.begin < begin + needed && begin < region.end;
  };
  // Regions that are not in the way may be older than one that is.
  while (std::any_of(regions_.begin(), regions_.end(), in_the_way)) FreeOldest();
  regions_.push_back({begin, begin + needed, {}});
  return own_.area() + begin;
}

void SharedMesh::FreeOldest() {
  for (const auto& [reader, number] : regions_.front().readers) {
    const uint32_t least = number;
    Wait(reader, segments_[reader].lane(rank_).released,
         [&](uint32_t released) { return static_cast<int32_t>(released - least) >= 0; });
  }
  regions_.pop_front();
}

void SharedMesh::Announce(int reader, uint64_t slot, const char* data, size_t bytes) {
  const uint32_t number = ++peers_[reader].sent;
  Wait(reader, segments_[reader].lane(rank_).released,
       [&](uint32_t released) { return number - released <= kCells; });
  Cell& cell = own_.lane(reader).cells[number % kCells];
  cell.bytes = static_cast<uint32_t>(bytes);
  cell.slot = slot;
  if (bytes <= kInlineBytes) {
    std::memcpy(cell.data, data, bytes);
  } else {
    cell.offset = static_cast<uint64_t>(data - own_.area());
    regions_.back().readers.emplace_back(reader, number);
  }
  Publish(reader, cell.stamp, number);
}

const char* SharedMesh::Receive(int rank, uint64_t slot, size_t bytes) {
  const Segment& segment = segments_[rank];
  const uint32_t number = ++peers_[rank].received;
  const Cell& cell = segment.lane(rank_).cells[number % kCells];
  Wait(rank, cell.stamp, [&](uint32_t stamp) { return stamp == number; });
  if (cell.slot != slot || cell.bytes != bytes) {
    // The other rank runs another collective. The hub will say so, and abort.
    Wait(rank, cell.stamp, [](uint32_t) { return false; });
  }
  if (bytes <= kInlineBytes) return cell.data;
  const uint64_t offset = cell.offset;
  if (offset > segment.area_bytes() || bytes > segment.area_bytes() - offset) Throw(rank);
  return segment.area() + offset;
}

void SharedMesh::Release(int rank) {
  Publish(rank, own_.lane(rank).released, ++peers_[rank].released);
}

void SharedMesh::WaitUntilReleased(int rank) {
  const uint32_t sent = peers_[rank].sent;
  Wait(rank, segments_[rank].lane(rank_).released,
       [&](uint32_t released) { return released == sent; });
}

/// Sets a word in this rank's own segment, and wakes `rank` if it may sleep on the word. First
/// stores the word and then loads the flag of the sleeper, while Wait does these in the opposite
/// order: so either this rank sees that the other one may sleep, or the other one sees the new
/// value.
void SharedMesh::Publish(int rank, std::atomic<uint32_t>& word, uint32_t value) {
  word.store(value, std::memory_order_seq_cst);
  if (segments_[rank].lane(rank_).sleeping.load(std::memory_order_seq_cst) != 0) Wake(word);
}

template <typename HasCome>
void SharedMesh::Wait(int rank, const std::atomic<uint32_t>& word, const HasCome& has_come) {
  const auto arrived = [&] { return has_come(word.load(std::memory_order_acquire)); };
  if (arrived()) return;
  const Clock::time_point start = Clock::now();
  if (Look(spins_, arrived, [&] { return aborted_.load(); })) return;
  awaited_ = rank;
  std::atomic<uint32_t>& sleeping = own_.lane(rank).sleeping;
  const Clock::time_point until = start + timeout_;
  for (;;) {
    const bool over = aborted_ || Clock::now() >= until || sockets_[rank].HasEnded();
    sleeping.store(1, std::memory_order_seq_cst);
    const uint32_t value = word.load(std::memory_order_seq_cst);
    if (has_come(value)) break;
    if (over) {
      sleeping.store(0, std::memory_order_relaxed);
      Throw(rank);
    }
    Sleep(word, value, kNap);
  }
  sleeping.store(0, std::memory_order_relaxed);
  awaited_ = -1;
}

void SharedMesh::Throw(int rank) const {
  const std::string name = "rank " + std::to_string(rank);
  if (aborted_) throw TransportError("aborted");
  throw TransportError(name + (sockets_[rank].HasEnded() ? " (it has ended)" : " (no message)"));
}

/// Wakes every word of other ranks on which a thread of this rank may sleep.
void SharedMesh::Abort() {
  aborted_ = true;
  for (const Segment& segment : segments_) {
    if (!segment.mapped()) continue;
    const Lane& lane = segment.lane(rank_);
    Wake(lane.released);
    for (const Cell& cell : lane.cells) Wake(cell.stamp);
  }
}

}  // namespace onnxpar
