#include "chunks.h"

#include <algorithm>
#include <cstring>

#include "hash.h"

namespace onnxpar {
namespace {

/// The largest piece of a message: large enough to make the overhead of messages small, small
/// enough for the cache, and a multiple of every element size.
constexpr size_t kPieceBytes = 512 * 1024;

/// True if two parts for different members are the same bytes of the same tensor.
bool SameBytes(const Part& a, const Part& b) {
  return a.placed && a.base == b.base && a.block.offset == b.block.offset &&
         a.block.rows == b.block.rows && a.block.row_bytes == b.block.row_bytes &&
         a.block.stride == b.block.stride;
}

}  // namespace

Cut Cut::WithRoom(const Links& links, size_t pieces) {
  return {std::min(kPieceBytes, links.shared.MaxBytes(pieces))};
}

size_t Cut::CountOf(const Block& block) const {
  return std::max<size_t>(1, (block.Bytes() + piece - 1) / piece);
}

Range Cut::RangeOf(const Block& block, size_t chunk) const {
  const size_t begin = std::min(chunk * piece, block.Bytes());
  return {begin, std::min(piece, block.Bytes() - begin)};
}

std::vector<Part> PartsAt(const void* base, const std::vector<Block>& blocks, const Call& call) {
  std::vector<Part> parts;
  parts.reserve(blocks.size());
  for (const Block& block : blocks) {
    if (block.member != call.me) parts.push_back({base, block});
  }
  return parts;
}

Chunks::Chunks(Links& links, const Call& call, uint64_t phase, Cut cut,
               const std::vector<Part>& sends, const std::vector<Part>& receives, Scratch& scratch)
    : links_(links),
      call_(call),
      key_(Mix(call.key, phase)),
      cut_(cut),
      sends_(LanesOf(sends, true)),
      receives_(LanesOf(receives, false)),
      scratch_(scratch.Get(2 * staged_bytes_)) {
  CountCrossing();
}

Chunks::Lanes Chunks::LanesOf(const std::vector<Part>& parts, bool outgoing) {
  Lanes all;
  all.parts.reserve(parts.size());
  for (const Part& part : parts) {
    const int member = part.block.member;
    const size_t at = all.parts.size();
    if (all.lanes.empty() || all.lanes.back().member != member) {
      const bool shared = links_.shared.Reaches(call_.ranks[member]);
      all.lanes.push_back({member, at, at, 0, shared, false});
    }
    all.parts.push_back({part, 0, {}});
    Lane& lane = all.lanes.back();
    lane.end = at + 1;
    lane.count = std::max(lane.count, cut_.CountOf(part.block));
    count_ = std::max(count_, lane.count);
  }
  for (Lane& lane : all.lanes) Stage(all, lane, outgoing);
  return all;
}

/// Reserves scratch memory for a lane's chunks if they have no other place. Messages in shared
/// memory have one, and Gloo sends and receives contiguous bytes of a tensor directly.
void Chunks::Stage(Lanes& all, Lane& lane, bool outgoing) {
  const Part& first = all.parts[lane.begin];
  const bool in_place = first.placed && lane.end == lane.begin + 1 && first.block.Contiguous();
  lane.staged = !lane.shared && !in_place;
  if (!lane.staged && (first.placed || !outgoing)) return;
  for (size_t i = lane.begin; i < lane.end; ++i) {
    all.parts[i].slot = staged_bytes_;
    staged_bytes_ += std::min(cut_.piece, all.parts[i].block.Bytes());
  }
}

/// Adds this phase to the count of bytes and rounds between hosts. A phase with a message between
/// hosts, even an empty one, is one round; its bytes are the larger of those sent and received.
void Chunks::CountCrossing() const {
  const auto crossing = [&](const Lanes& all, bool& any) {
    size_t bytes = 0;
    for (const Piece& piece : all.parts) {
      if (links_.IsHere(call_.ranks[piece.block.member])) continue;
      any = true;
      bytes += piece.block.Bytes();
    }
    return bytes;
  };
  bool any = false;
  const size_t sent = crossing(sends_, any);
  const size_t received = crossing(receives_, any);
  links_.crossing.rounds += any ? 1 : 0;
  links_.crossing.bytes += std::max(sent, received);
}

uint64_t Chunks::SlotOf(size_t bytes, size_t chunk) const { return Mix(Mix(key_, chunk), bytes); }

char* Chunks::Slot(const Piece& piece, size_t chunk) const {
  return scratch_ + chunk % 2 * staged_bytes_ + piece.slot;
}

size_t Chunks::BytesOf(const Lanes& all, const Lane& lane, size_t chunk) const {
  size_t bytes = 0;
  for (size_t i = lane.begin; i < lane.end; ++i) {
    bytes += cut_.RangeOf(all.parts[i].block, chunk).size;
  }
  return bytes;
}

/// True if this rank sends the same bytes to the members of two lanes.
bool Chunks::Alike(const Lane& a, const Lane& b) const {
  const auto begin = sends_.parts.begin();
  return std::equal(begin + a.begin, begin + a.end, begin + b.begin, begin + b.end, SameBytes);
}

void Chunks::Pack(const Lane& lane, size_t chunk, char* memory) const {
  for (size_t i = lane.begin; i < lane.end; ++i) {
    const Piece& piece = sends_.parts[i];
    const Range range = cut_.RangeOf(piece.block, chunk);
    if (piece.placed) {
      PackBlock(piece.base, piece.block, range, memory);
    } else if (memory != Slot(piece, chunk)) {
      std::memmove(memory, Slot(piece, chunk), range.size);
    }
    memory += range.size;
  }
}

/// Divides a received message into the lane's parts: copies a placed part to its tensor, and
/// remembers the address of an unplaced part for Arrived.
void Chunks::Unpack(const Lane& lane, size_t chunk, const char* memory) {
  for (size_t i = lane.begin; i < lane.end; ++i) {
    Piece& piece = receives_.parts[i];
    const Range range = cut_.RangeOf(piece.block, chunk);
    piece.arrived[chunk % 2] = memory;
    if (piece.placed) UnpackBlock(memory, At(piece.base, 0), piece.block, range);
    memory += range.size;
  }
}

void Chunks::Post(size_t chunk) {
  if (links_.gloo) PostGloo(chunk);
  PostShared(chunk);
}

/// Sends a chunk through shared memory. Members that get the same bytes read one common message.
void Chunks::PostShared(size_t chunk) {
  const auto goes = [&](const Lane& lane) { return lane.shared && chunk < lane.count; };
  const auto& lanes = sends_.lanes;
  for (auto lane = lanes.begin(); lane != lanes.end(); ++lane) {
    const auto alike = [&](const Lane& other) { return goes(other) && Alike(other, *lane); };
    if (!goes(*lane) || std::any_of(lanes.begin(), lane, alike)) continue;
    std::vector<int> readers = {RankOf(*lane)};
    for (auto other = lane + 1; other != lanes.end(); ++other) {
      if (alike(*other)) readers.push_back(RankOf(*other));
    }
    const size_t bytes = BytesOf(sends_, *lane, chunk);
    links_.shared.Send(readers, SlotOf(bytes, chunk), bytes,
                       [&](char* memory) { Pack(*lane, chunk, memory); });
  }
}

void Chunks::PostGloo(size_t chunk) {
  std::vector<Message> outgoing, incoming;
  const auto message = [&](const Lanes& all, const Lane& lane) {
    const Piece& first = all.parts[lane.begin];
    const size_t bytes = BytesOf(all, lane, chunk);
    const size_t begin = first.block.offset + cut_.RangeOf(first.block, chunk).begin;
    void* const data = lane.staged ? Slot(first, chunk) : At(first.base, begin);
    return Message{RankOf(lane), SlotOf(bytes, chunk), data, bytes};
  };
  for (const Lane& lane : receives_.lanes) {
    if (!lane.shared && chunk < lane.count) incoming.push_back(message(receives_, lane));
  }
  for (const Lane& lane : sends_.lanes) {
    if (lane.shared || chunk >= lane.count) continue;
    outgoing.push_back(message(sends_, lane));
    if (lane.staged) Pack(lane, chunk, Slot(sends_.parts[lane.begin], chunk));
  }
  if (incoming.empty() && outgoing.empty()) return;
  flights_[chunk % 2] = std::make_unique<GlooMesh::Flight>(*links_.gloo, outgoing, incoming);
}

void Chunks::Wait(size_t chunk) {
  for (const Lane& lane : receives_.lanes) {
    if (!lane.shared || chunk >= lane.count) continue;
    const size_t bytes = BytesOf(receives_, lane, chunk);
    Unpack(lane, chunk, links_.shared.Receive(RankOf(lane), SlotOf(bytes, chunk), bytes));
    if (receives_.parts[lane.begin].placed) links_.shared.Release(RankOf(lane));
  }
  if (!flights_[chunk % 2]) return;
  flights_[chunk % 2]->Wait();
  flights_[chunk % 2].reset();
  for (const Lane& lane : receives_.lanes) {
    if (lane.shared || !lane.staged || chunk >= lane.count) continue;
    Unpack(lane, chunk, Slot(receives_.parts[lane.begin], chunk));
  }
}

void Chunks::Release(size_t chunk) {
  for (const Lane& lane : receives_.lanes) {
    if (lane.shared && chunk < lane.count) links_.shared.Release(RankOf(lane));
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
  for (const Lane& lane : sends_.lanes) {
    if (lane.shared) links_.shared.WaitUntilReleased(RankOf(lane));
  }
}

}  // namespace onnxpar
