// Gloo's own collectives cannot be interrupted, end the process if ranks disagree on a size, and
// reduce in an order that depends on the algorithm. So these collectives are built from messages
// between two ranks. The two ends of a message have the same slot: a hash of all values on which
// both must agree.
#include "message_transport.h"

#include "chunks.h"
#include "links.h"
#include "ort.h"

namespace onnxpar {
namespace {

class MessageTransport : public Transport {
 public:
  MessageTransport(int rank, int size, Store& store, const Network& network,
                   std::chrono::milliseconds timeout)
      : links_(rank, size, store, network, timeout, MediumFromEnvironment()) {}

  void AllReduce(const Call& call, const Reduction& reduction, const void* in, void* out,
                 size_t elements) override;
  void ReduceScatter(const Call& call, const Reduction& reduction, const void* in,
                     const std::vector<Block>& blocks, void* out) override;
  void AllGather(const Call& call, const void* in, void* out,
                 const std::vector<Block>& blocks) override;
  void Broadcast(const Call& call, int root, void* data, size_t bytes) override;
  void Exchange(const Call& call, const void* in, const std::vector<Block>& sends, void* out,
                const std::vector<Block>& receives) override;
  void Abort() override { links_.Abort(); }
  bool SharesMemoryWith(int rank) const override { return links_.shared.Reaches(rank); }

 private:
  /// The steps of a collective. They are part of the slot, so that messages of different steps do
  /// not match.
  enum Phase { kFirst, kSecond };

  template <typename AfterPiece>
  void Reduce(const Call& call, const Reduction& reduction, const void* in,
              const std::vector<Block>& blocks, void* out, const AfterPiece& after_chunk);
  void Move(const Call& call, Phase phase, const void* in, const std::vector<Block>& sends,
            void* out, const std::vector<Block>& receives);

  Links links_;
  Scratch move_scratch_;
  Scratch reduce_scratch_;
};

/// Returns one block for each member; all blocks are the same bytes.
std::vector<Block> ToEach(const Call& call, const Range& range) {
  std::vector<Block> blocks;
  for (int member = 0; member < call.size(); ++member) {
    blocks.push_back(Run(member, range.size, range.begin));
  }
  return blocks;
}

/// Divides `elements` into one part for each member.
std::vector<Block> PartsOf(const Call& call, size_t elements, size_t element_size) {
  std::vector<Block> parts;
  for (int member = 0; member < call.size(); ++member) {
    const Range part = PartOf(elements, call.ranks.size(), static_cast<size_t>(member));
    parts.push_back(Run(member, part.size * element_size, part.begin * element_size));
  }
  return parts;
}

/// Small operands take one step; large ones are a ReduceScatter and an AllGather, overlapped chunk
/// by chunk. `out` may be `in`: the result of a part comes from the member to which this rank sent
/// that part, so no part is overwritten before it was sent.
void MessageTransport::AllReduce(const Call& call, const Reduction& reduction, const void* in,
                                 void* out, size_t elements) {
  const size_t element_size = ElementSize(reduction.type);
  const size_t bytes = elements * element_size;
  if (IsDirect(call, bytes)) {
    return Reduce(call, reduction, in, ToEach(call, {0, bytes}), out, [](size_t) {});
  }
  const std::vector<Block> parts = PartsOf(call, elements, element_size);
  const Block& mine = parts[call.me];
  const std::vector<Block> results = ToEach(call, {mine.offset, mine.Bytes()});
  Chunks gather(links_, call, kSecond, out, results, out, parts, Chunks::kToOut, move_scratch_);
  Reduce(call, reduction, in, parts, At(out, mine.offset), [&](size_t chunk) {
    gather.Post(chunk);
    if (chunk > 0) gather.Wait(chunk - 1);
  });
  gather.Wait(gather.Count() - 1);
}

void MessageTransport::ReduceScatter(const Call& call, const Reduction& reduction, const void* in,
                                     const std::vector<Block>& blocks, void* out) {
  Reduce(call, reduction, in, blocks, out, [](size_t) {});
}

/// Sends `blocks[i]` of `in` to each member i, and reduces the blocks that this member receives,
/// and its own, into `out`. Calls after_chunk(i) after chunk i of `out` is complete.
template <typename AfterPiece>
void MessageTransport::Reduce(const Call& call, const Reduction& reduction, const void* in,
                              const std::vector<Block>& blocks, void* out,
                              const AfterPiece& after_chunk) {
  const Block& mine = blocks[call.me];
  const std::vector<Block> receives = ToEach(call, {0, mine.Bytes()});
  Chunks arriving(links_, call, kFirst, in, blocks, nullptr, receives, Chunks::kStays,
                  reduce_scratch_);
  std::vector<const void*> sources(call.ranks.size());
  arriving.Post(0);
  for (size_t chunk = 0; chunk < arriving.Count(); ++chunk) {
    if (chunk + 1 < arriving.Count()) arriving.Post(chunk + 1);
    arriving.Wait(chunk);
    const Range range = arriving.RangeOf(mine, chunk);
    for (int member = 0; member < call.size(); ++member) {
      sources[member] = arriving.Arrived(member, chunk);
    }
    if (mine.Contiguous()) {
      sources[call.me] = At(in, mine.offset + range.begin);
    } else {
      PackBlock(in, mine, range, arriving.Own(chunk));
      sources[call.me] = arriving.Own(chunk);
    }
    Fold(reduction, sources.data(), sources.size(), At(out, range.begin),
         range.size / ElementSize(reduction.type));
    arriving.Release(chunk);
    after_chunk(chunk);
  }
}

/// A member that has received all blocks knows that all agree: the key has the sizes of all blocks.
void MessageTransport::AllGather(const Call& call, const void* in, void* out,
                                 const std::vector<Block>& blocks) {
  const std::vector<Block> sends = ToEach(call, {0, blocks[call.me].Bytes()});
  CopyBlock(in, sends[call.me], out, blocks[call.me]);
  Chunks(links_, call, kFirst, in, sends, out, blocks, Chunks::kToOut, move_scratch_).Move();
}

/// If there are many bytes, the root sends a different part to each member, and the members then
/// exchange these parts.
void MessageTransport::Broadcast(const Call& call, int root, void* data, size_t bytes) {
  const bool dealt = IsDealt(call, bytes);
  std::vector<Block> chunks;  // of all members but the root
  for (int member = 0; member < call.size(); ++member) {
    if (member == root) continue;
    const Range range = dealt ? PartOf(bytes, call.size() - 1, chunks.size()) : Range{0, bytes};
    chunks.push_back(Run(member, range.size, range.begin));
  }
  if (call.me == root) return Move(call, kFirst, data, chunks, data, {});

  const Block& mine = chunks[call.me - (call.me > root ? 1 : 0)];
  Move(call, kFirst, data, {}, data, {Run(root, mine.Bytes(), mine.offset)});
  if (!dealt) return;
  std::vector<Block> sends;
  for (const Block& chunk : chunks) sends.push_back(Run(chunk.member, mine.Bytes(), mine.offset));
  Move(call, kSecond, data, sends, data, chunks);
}

void MessageTransport::Exchange(const Call& call, const void* in, const std::vector<Block>& sends,
                                void* out, const std::vector<Block>& receives) {
  for (const Block& from : sends) {
    if (from.member != call.me) continue;
    for (const Block& to : receives) {
      if (to.member == call.me) CopyBlock(in, from, out, to);
    }
  }
  Move(call, kFirst, in, sends, out, receives);
}

void MessageTransport::Move(const Call& call, Phase phase, const void* in,
                            const std::vector<Block>& sends, void* out,
                            const std::vector<Block>& receives) {
  Chunks chunks(links_, call, phase, in, sends, out, receives, Chunks::kToOut, move_scratch_);
  chunks.Move();
  chunks.WaitUntilReceived();
}

}  // namespace

bool IsDirect(const Call& call, size_t bytes) {
  return bytes * (call.ranks.size() - 1) <= kDirectBytes;
}

bool IsDealt(const Call& call, size_t bytes) { return bytes > kScatteredBytes && call.size() > 2; }

std::unique_ptr<Transport> ConnectRanks(int rank, int size, Store& store, const Network& network,
                                        std::chrono::milliseconds timeout) {
  return std::make_unique<MessageTransport>(rank, size, store, network, timeout);
}

}  // namespace onnxpar
