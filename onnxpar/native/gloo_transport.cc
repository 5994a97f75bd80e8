// Gloo's own collectives cannot be interrupted, end the process when ranks disagree on a size, and
// reduce in an order that depends on the algorithm. So these are built from its messages, each of
// which is matched by a slot that hashes all that its two ends must agree on.
#include "gloo_transport.h"

#include <algorithm>

#include "gloo_mesh.h"
#include "hash.h"
#include "ort.h"

namespace onnxpar {
namespace {

/// An all-reduce that sends no more than this is one step, everything to everyone, instead of two.
constexpr size_t kDirectBytes = 384 * 1024;
/// A larger one runs in segments of at most this size per member.
constexpr size_t kSegmentBytes = 512 * 1024;

/// From here on a broadcast to several ranks has them pass chunks on.
constexpr size_t kDealtBytes = 64 * 1024;

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

class GlooTransport : public Transport {
 public:
  GlooTransport(int rank, int size, gloo::rendezvous::Store& store, const std::string& address,
                std::chrono::milliseconds timeout)
      : mesh_(rank, size, store, address, timeout) {}

  void AllReduce(const Call& call, const Reduction& reduction, const void* in, void* out,
                 size_t elements) override;
  void ReduceScatter(const Call& call, const Reduction& reduction, const void* in,
                     const std::vector<Block>& blocks, void* out) override;
  void AllGather(const Call& call, const void* in, void* out,
                 const std::vector<Block>& blocks) override;
  void Broadcast(const Call& call, int root, void* data, size_t bytes) override;
  void Exchange(const Call& call, const void* in, const std::vector<Block>& sends, void* out,
                const std::vector<Block>& receives) override;
  void Abort() override { mesh_.Abort(); }

 private:
  void DirectAllReduce(const Call& call, const Reduction& reduction, const void* in, void* out,
                       size_t elements);
  void SegmentedAllReduce(const Call& call, const Reduction& reduction, const void* in, void* out,
                          size_t elements);
  /// Exchange, without the block that stays on this rank.
  void Transfer(const Call& call, uint64_t step, const void* in, const std::vector<Block>& sends,
                void* out, const std::vector<Block>& receives);

  GlooMesh mesh_;
  Scratch reduce_scratch_;
  Scratch pack_scratch_;
};

Message MessageAt(const Call& call, uint64_t step, int member, void* data, size_t bytes) {
  return {call.ranks[member], Mix(Mix(call.key, step), bytes), data, bytes};
}

void* At(const void* base, size_t offset) {
  return static_cast<char*>(const_cast<void*>(base)) + offset;
}

void GlooTransport::AllReduce(const Call& call, const Reduction& reduction, const void* in,
                              void* out, size_t elements) {
  const size_t others = call.ranks.size() - 1;
  if (elements * ElementSize(reduction.type) * others <= kDirectBytes) {
    DirectAllReduce(call, reduction, in, out, elements);
  } else {
    SegmentedAllReduce(call, reduction, in, out, elements);
  }
}

void GlooTransport::DirectAllReduce(const Call& call, const Reduction& reduction, const void* in,
                                    void* out, size_t elements) {
  const size_t bytes = elements * ElementSize(reduction.type);
  char* scratch = reduce_scratch_.Get(bytes * call.size());
  std::vector<Block> sends, receives;
  std::vector<const void*> sources;
  for (int member = 0; member < call.size(); ++member) {
    sends.push_back(Run(member, bytes));
    receives.push_back(Run(member, bytes, member * bytes));
    sources.push_back(member == call.me ? in : scratch + member * bytes);
  }
  Transfer(call, 0, in, sends, scratch, receives);
  Fold(reduction, sources.data(), sources.size(), out, elements);
}

/// One all-reduce, segment by segment: member i gets and reduces chunk i of a segment, then gives
/// the result to all. `out` may be `in`: a chunk's result comes back from the member it was sent
/// to.
class Segments {
 public:
  Segments(GlooMesh& mesh, const Call& call, const Reduction& reduction, const void* in, void* out,
           size_t elements, Scratch& scratch)
      : mesh_(mesh),
        call_(call),
        reduction_(reduction),
        in_(in),
        out_(out),
        elements_(elements),
        element_size_(ElementSize(reduction.type)),
        count_((elements * element_size_ - 1) / (kSegmentBytes * call.size()) + 1),
        slot_bytes_(Chunk(0, 0).size),
        scratch_(scratch.Get(2 * slot_bytes_ * call.size())) {}

  size_t Count() const { return count_; }

  std::unique_ptr<GlooMesh::Flight> Scatter(size_t segment) {
    return Fly([&](int member, std::vector<Message>& sends, std::vector<Message>& receives) {
      const Range theirs = Chunk(segment, member);
      const Range mine = Chunk(segment, call_.me);
      sends.push_back(MessageAt(call_, 2 * segment, member, At(in_, theirs.begin), theirs.size));
      receives.push_back(
          MessageAt(call_, 2 * segment, member, Received(segment, member), mine.size));
    });
  }

  void Reduce(size_t segment) {
    const Range mine = Chunk(segment, call_.me);
    std::vector<const void*> sources;
    for (int member = 0; member < call_.size(); ++member) {
      sources.push_back(member == call_.me ? At(in_, mine.begin) : Received(segment, member));
    }
    Fold(reduction_, sources.data(), sources.size(), At(out_, mine.begin),
         mine.size / element_size_);
  }

  std::unique_ptr<GlooMesh::Flight> Gather(size_t segment) {
    return Fly([&](int member, std::vector<Message>& sends, std::vector<Message>& receives) {
      const Range theirs = Chunk(segment, member);
      const Range mine = Chunk(segment, call_.me);
      const uint64_t step = 2 * segment + 1;
      sends.push_back(MessageAt(call_, step, member, At(out_, mine.begin), mine.size));
      receives.push_back(MessageAt(call_, step, member, At(out_, theirs.begin), theirs.size));
    });
  }

 private:
  /// In bytes.
  Range Chunk(size_t segment, int member) const {
    const Range whole = PartOf(elements_, count_, segment);
    const Range part = PartOf(whole.size, call_.size(), member);
    return {(whole.begin + part.begin) * element_size_, part.size * element_size_};
  }

  /// Two segments are under way at a time.
  void* Received(size_t segment, int member) const {
    return scratch_ + (segment % 2 * call_.size() + member) * slot_bytes_;
  }

  template <typename AddMessages>
  std::unique_ptr<GlooMesh::Flight> Fly(const AddMessages& add) {
    std::vector<Message> sends, receives;
    for (int member = 0; member < call_.size(); ++member) {
      if (member != call_.me) add(member, sends, receives);
    }
    return std::make_unique<GlooMesh::Flight>(mesh_, sends, receives);
  }

  GlooMesh& mesh_;
  const Call& call_;
  const Reduction& reduction_;
  const void* const in_;
  void* const out_;
  const size_t elements_;
  const size_t element_size_;
  const size_t count_;
  const size_t slot_bytes_;
  char* const scratch_;
};

void GlooTransport::SegmentedAllReduce(const Call& call, const Reduction& reduction, const void* in,
                                       void* out, size_t elements) {
  Segments segments(mesh_, call, reduction, in, out, elements, reduce_scratch_);
  std::unique_ptr<GlooMesh::Flight> scattering = segments.Scatter(0);
  std::unique_ptr<GlooMesh::Flight> gathering;
  for (size_t segment = 0; segment < segments.Count(); ++segment) {
    std::unique_ptr<GlooMesh::Flight> next;
    if (segment + 1 < segments.Count()) next = segments.Scatter(segment + 1);
    scattering->Wait();
    segments.Reduce(segment);
    if (gathering) gathering->Wait();
    gathering = segments.Gather(segment);
    scattering = std::move(next);
  }
  gathering->Wait();
}

void GlooTransport::ReduceScatter(const Call& call, const Reduction& reduction, const void* in,
                                  const std::vector<Block>& blocks, void* out) {
  const size_t bytes = blocks[call.me].Bytes();
  char* scratch = reduce_scratch_.Get(bytes * call.size());
  std::vector<Block> receives;
  std::vector<const void*> sources;
  for (int member = 0; member < call.size(); ++member) {
    receives.push_back(Run(member, bytes, member * bytes));
    sources.push_back(scratch + member * bytes);
  }
  CopyBlock(in, blocks[call.me], scratch, receives[call.me]);
  Transfer(call, 0, in, blocks, scratch, receives);
  Fold(reduction, sources.data(), sources.size(), out, bytes / ElementSize(reduction.type));
}

void GlooTransport::AllGather(const Call& call, const void* in, void* out,
                              const std::vector<Block>& blocks) {
  std::vector<Block> sends;
  for (int member = 0; member < call.size(); ++member) {
    sends.push_back(Run(member, blocks[call.me].Bytes()));
  }
  Exchange(call, in, sends, out, blocks);
}

/// The root deals a chunk to each other member; these then gather the chunks among themselves.
void GlooTransport::Broadcast(const Call& call, int root, void* data, size_t bytes) {
  const bool dealt = bytes > kDealtBytes && call.size() > 2;
  std::vector<Block> chunks;  // of all members but the root
  for (int member = 0; member < call.size(); ++member) {
    if (member == root) continue;
    const Range range = dealt ? PartOf(bytes, call.size() - 1, chunks.size()) : Range{0, bytes};
    chunks.push_back(Run(member, range.size, range.begin));
  }
  if (call.me == root) return Transfer(call, 0, data, chunks, data, {});

  const Block& mine = chunks[call.me - (call.me > root ? 1 : 0)];
  Transfer(call, 0, data, {}, data, {Run(root, mine.Bytes(), mine.offset)});
  if (!dealt) return;
  std::vector<Block> sends;
  for (const Block& chunk : chunks) sends.push_back(Run(chunk.member, mine.Bytes(), mine.offset));
  Transfer(call, 1, data, sends, data, chunks);
}

void GlooTransport::Exchange(const Call& call, const void* in, const std::vector<Block>& sends,
                             void* out, const std::vector<Block>& receives) {
  for (const Block& from : sends) {
    if (from.member != call.me) continue;
    for (const Block& to : receives) {
      if (to.member == call.me) CopyBlock(in, from, out, to);
    }
  }
  Transfer(call, 0, in, sends, out, receives);
}

void GlooTransport::Transfer(const Call& call, uint64_t step, const void* in,
                             const std::vector<Block>& sends, void* out,
                             const std::vector<Block>& receives) {
  const auto packed = [&](const Block& b) { return b.member != call.me && !b.Contiguous(); };
  size_t packed_bytes = 0;
  for (const Block& block : sends) packed_bytes += packed(block) ? block.Bytes() : 0;
  for (const Block& block : receives) packed_bytes += packed(block) ? block.Bytes() : 0;
  char* free = pack_scratch_.Get(packed_bytes);

  std::vector<Message> outgoing, incoming;
  for (const Block& block : sends) {
    if (block.member == call.me) continue;
    void* data = At(in, block.offset);
    if (packed(block)) {
      data = free;
      free += block.Bytes();
      CopyBlock(in, block, data, Run(block.member, block.Bytes()));
    }
    outgoing.push_back(MessageAt(call, step, block.member, data, block.Bytes()));
  }
  for (const Block& block : receives) {
    if (block.member == call.me) continue;
    void* data = At(out, block.offset);
    if (packed(block)) {
      data = free;
      free += block.Bytes();
    }
    incoming.push_back(MessageAt(call, step, block.member, data, block.Bytes()));
  }
  GlooMesh::Flight(mesh_, outgoing, incoming).Wait();

  auto message = incoming.begin();
  for (const Block& block : receives) {
    if (block.member == call.me) continue;
    if (packed(block)) CopyBlock(message->data, Run(block.member, block.Bytes()), out, block);
    ++message;
  }
}

}  // namespace

std::unique_ptr<Transport> ConnectGloo(int rank, int size, gloo::rendezvous::Store& store,
                                       const std::string& address,
                                       std::chrono::milliseconds timeout) {
  return std::make_unique<GlooTransport>(rank, size, store, address, timeout);
}

}  // namespace onnxpar
