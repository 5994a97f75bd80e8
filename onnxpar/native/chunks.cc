#include "chunks.h"

#include <algorithm>

#include "hash.h"

namespace onnxpar {
namespace {

/// The largest chunk: large enough to make the overhead of messages small, small enough for the
/// cache, and a multiple of every element size.
constexpr size_t kPieceBytes = 512 * 1024;

/// True if two blocks are the same bytes, for different members.
bool SameBytes(const Block& a, const Block& b) {
  return a.offset == b.offset && a.rows == b.rows && a.row_bytes == b.row_bytes &&
         a.stride == b.stride;
}

}  // namespace

Chunks::Chunks(Links& links, const Call& call, uint64_t phase, const void* in,
               const std::vector<Block>& sends, void* out, const std::vector<Block>& receives,
               Arrival arrival, Scratch& scratch)
    : links_(links),
      call_(call),
      key_(Mix(call.key, phase)),
      in_(in),
      out_(out),
      stays_(arrival == kStays),
      piece_(std::min(kPieceBytes, SharedMesh::MaxBytes(call.ranks.size()))),
      sends_(LanesOf(sends, false)),
      receives_(LanesOf(receives, stays_)),
      scratch_(scratch.Get(2 * staged_bytes_)) {}

/// Blocks that go through shared memory need no scratch memory, except for this rank's own block.
std::vector<Chunks::Lane> Chunks::LanesOf(const std::vector<Block>& blocks, bool stays) {
  std::vector<Lane> lanes;
  lanes.reserve(blocks.size());
  for (const Block& block : blocks) {
    const bool own = block.member == call_.me;
    const bool shared = !own && links_.shared.Reaches(call_.ranks[block.member]);
    const bool staged = own ? stays : !shared && (stays || !block.Contiguous());
    lanes.push_back({&block, shared, staged, staged_bytes_, {}});
    if (staged) staged_bytes_ += std::min(piece_, block.Bytes());
    count_ = std::max(count_, CountOf(block));
  }
  return lanes;
}

/// Returns the number of chunks of a block. An empty block is one empty chunk, so that its two
/// members still exchange a message.
size_t Chunks::CountOf(const Block& block) const {
  return std::max<size_t>(1, (block.Bytes() + piece_ - 1) / piece_);
}

Range Chunks::RangeOf(const Block& block, size_t chunk) const {
  const size_t begin = std::min(chunk * piece_, block.Bytes());
  return {begin, std::min(piece_, block.Bytes() - begin)};
}

bool Chunks::Moves(const Lane& lane, size_t chunk) const {
  return lane.block->member != call_.me && chunk < CountOf(*lane.block);
}

uint64_t Chunks::SlotOf(const Range& range, size_t chunk) const {
  return Mix(Mix(key_, chunk), range.size);
}

char* Chunks::Slot(const Lane& lane, size_t chunk) const {
  return scratch_ + chunk % 2 * staged_bytes_ + lane.slot;
}

void Chunks::Post(size_t chunk) {
  if (links_.gloo) PostGloo(chunk);
  PostShared(chunk);
}

/// Members that get the same bytes share one message.
void Chunks::PostShared(size_t chunk) {
  const auto goes = [&](const Lane& lane) { return lane.shared && Moves(lane, chunk); };
  for (auto lane = sends_.begin(); lane != sends_.end(); ++lane) {
    const auto alike = [&](const Lane& other) {
      return goes(other) && SameBytes(*other.block, *lane->block);
    };
    if (!goes(*lane) || std::any_of(sends_.begin(), lane, alike)) continue;
    std::vector<int> readers;
    for (auto other = lane; other != sends_.end(); ++other) {
      if (alike(*other)) readers.push_back(RankOf(*other));
    }
    const Range range = RangeOf(*lane->block, chunk);
    links_.shared.Send(readers, SlotOf(range, chunk), range.size,
                       [&](char* memory) { PackBlock(in_, *lane->block, range, memory); });
  }
}

void Chunks::PostGloo(size_t chunk) {
  std::vector<Message> outgoing, incoming;
  const auto message = [&](const Lane& lane, const void* base) {
    const Range range = RangeOf(*lane.block, chunk);
    void* data = lane.staged ? Slot(lane, chunk) : At(base, lane.block->offset + range.begin);
    return Message{RankOf(lane), SlotOf(range, chunk), data, range.size};
  };
  for (const Lane& lane : receives_) {
    if (!lane.shared && Moves(lane, chunk)) incoming.push_back(message(lane, out_));
  }
  for (const Lane& lane : sends_) {
    if (lane.shared || !Moves(lane, chunk)) continue;
    outgoing.push_back(message(lane, in_));
    if (lane.staged) PackBlock(in_, *lane.block, RangeOf(*lane.block, chunk), outgoing.back().data);
  }
  flights_[chunk % 2] = std::make_unique<GlooMesh::Flight>(*links_.gloo, outgoing, incoming);
}

void Chunks::Wait(size_t chunk) {
  for (Lane& lane : receives_) {
    if (!lane.shared || !Moves(lane, chunk)) continue;
    const Range range = RangeOf(*lane.block, chunk);
    const char* const data = links_.shared.Receive(RankOf(lane), SlotOf(range, chunk), range.size);
    lane.arrived[chunk % 2] = data;
    if (stays_) continue;
    UnpackBlock(data, out_, *lane.block, range);
    links_.shared.Release(RankOf(lane));
  }
  if (!links_.gloo) return;
  flights_[chunk % 2]->Wait();
  flights_[chunk % 2].reset();
  for (Lane& lane : receives_) {
    if (lane.shared || !lane.staged || !Moves(lane, chunk)) continue;
    lane.arrived[chunk % 2] = Slot(lane, chunk);
    if (stays_) continue;
    UnpackBlock(Slot(lane, chunk), out_, *lane.block, RangeOf(*lane.block, chunk));
  }
}

void Chunks::Release(size_t chunk) {
  for (const Lane& lane : receives_) {
    if (lane.shared && Moves(lane, chunk)) links_.shared.Release(RankOf(lane));
  }
}

void Chunks::Move() {
  for (size_t chunk = 0; chunk < Count(); ++chunk) {
    Post(chunk);
    if (chunk > 0) Wait(chunk - 1);
  }
  if (Count() > 0) Wait(Count() - 1);
}

void Chunks::WaitUntilReceived() {
  for (const Lane& lane : sends_) {
    if (lane.shared) links_.shared.WaitUntilReleased(RankOf(lane));
  }
}

}  // namespace onnxpar
