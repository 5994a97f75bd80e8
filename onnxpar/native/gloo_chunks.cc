#include "gloo_chunks.h"

#include <algorithm>

#include "hash.h"

namespace onnxpar {
namespace {

/// The size of a chunk: large enough to make the overhead of messages small, small enough for the
/// cache, and a multiple of every element size.
constexpr size_t kPieceBytes = 512 * 1024;

/// Returns the number of chunks of a block. An empty block is one empty chunk, so that its two
/// members still exchange a message.
size_t CountOf(const Block& block) {
  return std::max<size_t>(1, (block.Bytes() + kPieceBytes - 1) / kPieceBytes);
}

}  // namespace

Chunks::Chunks(GlooMesh& mesh, const Call& call, uint64_t phase, const void* in,
               const std::vector<Block>& sends, void* out, const std::vector<Block>& receives,
               Staging staging, Scratch& scratch)
    : mesh_(mesh),
      call_(call),
      key_(Mix(call.key, phase)),
      in_(in),
      out_(out),
      sends_(LanesOf(sends, kWhereStrided)),
      receives_(LanesOf(receives, staging)),
      scratch_(scratch.Get(2 * staged_bytes_)) {}

std::vector<Chunks::Lane> Chunks::LanesOf(const std::vector<Block>& blocks, Staging staging) {
  std::vector<Lane> lanes;
  lanes.reserve(blocks.size());
  for (const Block& block : blocks) {
    const bool staged = staging == kAlways || !block.Contiguous();
    lanes.push_back({&block, staged, staged_bytes_});
    if (staged) staged_bytes_ += std::min(kPieceBytes, block.Bytes());
    count_ = std::max(count_, CountOf(block));
  }
  return lanes;
}

Range Chunks::RangeOf(const Block& block, size_t chunk) {
  const size_t begin = std::min(chunk * kPieceBytes, block.Bytes());
  return {begin, std::min(kPieceBytes, block.Bytes() - begin)};
}

bool Chunks::Moves(const Lane& lane, size_t chunk) const {
  return lane.block->member != call_.me && chunk < CountOf(*lane.block);
}

char* Chunks::Slot(const Lane& lane, size_t chunk) const {
  return scratch_ + chunk % 2 * staged_bytes_ + lane.slot;
}

char* Chunks::Staged(size_t index, size_t chunk) const { return Slot(receives_[index], chunk); }

void Chunks::Post(size_t chunk) {
  std::vector<Message> outgoing, incoming;
  const auto message = [&](const Lane& lane, const void* base) {
    const Block& block = *lane.block;
    const Range range = RangeOf(block, chunk);
    void* data = lane.staged ? Slot(lane, chunk) : At(base, block.offset + range.begin);
    const uint64_t slot = Mix(Mix(key_, chunk), range.size);
    return Message{call_.ranks[block.member], slot, data, range.size};
  };
  for (const Lane& lane : receives_) {
    if (Moves(lane, chunk)) incoming.push_back(message(lane, out_));
  }
  for (const Lane& lane : sends_) {
    if (!Moves(lane, chunk)) continue;
    outgoing.push_back(message(lane, in_));
    if (lane.staged) PackBlock(in_, *lane.block, RangeOf(*lane.block, chunk), outgoing.back().data);
  }
  flights_[chunk % 2] = std::make_unique<GlooMesh::Flight>(mesh_, outgoing, incoming);
}

void Chunks::Wait(size_t chunk) {
  flights_[chunk % 2]->Wait();
  flights_[chunk % 2].reset();
  for (const Lane& lane : receives_) {
    if (!lane.staged || out_ == nullptr || !Moves(lane, chunk)) continue;
    UnpackBlock(Slot(lane, chunk), out_, *lane.block, RangeOf(*lane.block, chunk));
  }
}

void Chunks::Move() {
  for (size_t chunk = 0; chunk < Count(); ++chunk) {
    Post(chunk);
    if (chunk > 0) Wait(chunk - 1);
  }
  if (Count() > 0) Wait(Count() - 1);
}

}  // namespace onnxpar
