#include "gloo_pieces.h"

#include <algorithm>

#include "hash.h"

namespace onnxpar {
namespace {

/// Large enough to make messages cheap, small enough for the cache; a multiple of any element.
constexpr size_t kPieceBytes = 512 * 1024;

/// An empty block is one empty piece, so that both ends still meet.
size_t CountOf(const Block& block) {
  return std::max<size_t>(1, (block.Bytes() + kPieceBytes - 1) / kPieceBytes);
}

}  // namespace

Pieces::Pieces(GlooMesh& mesh, const Call& call, uint64_t phase, const void* in,
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

std::vector<Pieces::Lane> Pieces::LanesOf(const std::vector<Block>& blocks, Staging staging) {
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

Range Pieces::RangeOf(const Block& block, size_t piece) {
  const size_t begin = std::min(piece * kPieceBytes, block.Bytes());
  return {begin, std::min(kPieceBytes, block.Bytes() - begin)};
}

bool Pieces::Moves(const Lane& lane, size_t piece) const {
  return lane.block->member != call_.me && piece < CountOf(*lane.block);
}

char* Pieces::Slot(const Lane& lane, size_t piece) const {
  return scratch_ + piece % 2 * staged_bytes_ + lane.slot;
}

char* Pieces::Staged(size_t index, size_t piece) const { return Slot(receives_[index], piece); }

void Pieces::Post(size_t piece) {
  std::vector<Message> outgoing, incoming;
  const auto message = [&](const Lane& lane, const void* base) {
    const Block& block = *lane.block;
    const Range range = RangeOf(block, piece);
    void* data = lane.staged ? Slot(lane, piece) : At(base, block.offset + range.begin);
    const uint64_t slot = Mix(Mix(key_, piece), range.size);
    return Message{call_.ranks[block.member], slot, data, range.size};
  };
  for (const Lane& lane : receives_) {
    if (Moves(lane, piece)) incoming.push_back(message(lane, out_));
  }
  for (const Lane& lane : sends_) {
    if (!Moves(lane, piece)) continue;
    outgoing.push_back(message(lane, in_));
    if (lane.staged) PackBlock(in_, *lane.block, RangeOf(*lane.block, piece), outgoing.back().data);
  }
  flights_[piece % 2] = std::make_unique<GlooMesh::Flight>(mesh_, outgoing, incoming);
}

void Pieces::Wait(size_t piece) {
  flights_[piece % 2]->Wait();
  flights_[piece % 2].reset();
  for (const Lane& lane : receives_) {
    if (!lane.staged || out_ == nullptr || !Moves(lane, piece)) continue;
    UnpackBlock(Slot(lane, piece), out_, *lane.block, RangeOf(*lane.block, piece));
  }
}

void Pieces::Move() {
  for (size_t piece = 0; piece < Count(); ++piece) {
    Post(piece);
    if (piece > 0) Wait(piece - 1);
  }
  if (Count() > 0) Wait(Count() - 1);
}

}  // namespace onnxpar
