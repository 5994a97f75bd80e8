// Gloo's own collectives cannot be interrupted, end the process if ranks disagree on a size, and
// reduce in an order that depends on the algorithm. So these collectives are built from messages
// between two ranks. The two ends of a message have the same slot: a hash of all values on which
// both must agree.
#include "message_transport.h"

#include "group_hosts.h"
#include "host_stages.h"
#include "links.h"
#include "ort.h"

namespace onnxpar {
namespace {

/// An AllReduce takes one step (every member gets all operands, or all hosts' partial results) if
/// no member then sends more bytes than this; else two steps, a ReduceScatter and an AllGather.
constexpr size_t kDirectBytes = 384 * 1024;
/// The most bytes that a host may receive beyond its need in an AllReduce of one step, because each
/// of its members receives the results of the other hosts.
constexpr size_t kSpareBytes = 64 * 1024;
/// In a Broadcast of more bytes, all other hosts together get one copy from the root, in parts that
/// they then exchange. With fewer bytes, each other host gets a copy of its own.
constexpr size_t kScatteredBytes = 64 * 1024;

/// The members that get one copy of a broadcast tensor together: each gets a part from the root,
/// and then they exchange their parts. Listed by host.
using Audience = std::vector<std::vector<int>>;

class MessageTransport : public Transport {
 public:
  MessageTransport(int rank, int size, Store& store, const Network& network,
                   std::chrono::milliseconds timeout, const std::vector<int>& simulated)
      : links_(rank, size, store, network, timeout, MediumFromEnvironment(), simulated) {}

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
  Crossing LastCrossing() const override { return links_.crossing; }
  int Awaited() const override { return links_.Awaited(); }

 private:
  GroupHosts Begin(const Call& call);
  void Gather(const Setting& setting, const Part& own, void* out, const std::vector<Block>& blocks);
  void GatherParts(const Call& call, const std::vector<Part>& parts);
  void Move(const Call& call, const std::vector<Part>& sends, const std::vector<Part>& receives);

  Links links_;
  Scratch move_scratch_;
  StageScratch reduce_scratch_;
  StageScratch gather_scratch_;
};

/// Resets the count of bytes and rounds between hosts, and returns the hosts of the call's group.
GroupHosts MessageTransport::Begin(const Call& call) {
  links_.crossing = {};
  return {call.ranks, call.me, links_.hosts};
}

/// True if an AllReduce of this many bytes takes one step; see kDirectBytes and kSpareBytes.
bool IsDirect(const GroupHosts& hosts, size_t bytes) {
  const size_t locals = hosts.Largest() - 1;
  const size_t elsewhere = hosts.Count() - 1;
  return bytes * (locals + elsewhere) <= kDirectBytes && bytes * locals * elsewhere <= kSpareBytes;
}

/// Small operands take one step; large operands take a ReduceScatter and an AllGather, overlapped
/// chunk by chunk. `out` may be `in`: the result of a part comes from the member to which this
/// rank, or its host, has sent its operand of this part, so a part is overwritten only after it was
/// sent.
void MessageTransport::AllReduce(const Call& call, const Reduction& reduction, const void* in,
                                 void* out, size_t elements) {
  const GroupHosts hosts = Begin(call);
  const Setting setting(links_, call, hosts);
  const size_t element_size = ElementSize(reduction.type);
  if (IsDirect(hosts, elements * element_size)) {
    Reducing::ToAll(setting, reduction, in, elements * element_size, out, reduce_scratch_)
        .Run([](size_t) {});
    return;
  }
  const std::vector<Block> parts = hosts.Parts(elements, element_size);
  const Block& mine = parts[call.me];
  Gathering gathering(setting, {out, mine}, out, parts, gather_scratch_);
  Reducing::ToOwners(setting, reduction, in, parts, At(out, mine.offset), reduce_scratch_)
      .Run([&](size_t chunk) { gathering.Post(chunk); });
  gathering.Finish();
}

void MessageTransport::ReduceScatter(const Call& call, const Reduction& reduction, const void* in,
                                     const std::vector<Block>& blocks, void* out) {
  const GroupHosts hosts = Begin(call);
  const Setting setting(links_, call, hosts);
  Reducing::ToOwners(setting, reduction, in, blocks, out, reduce_scratch_).Run([](size_t) {});
}

/// Does not need to wait until others have received this rank's block: the key includes the sizes
/// of all blocks, so a member that has received all blocks knows that all members agree.
void MessageTransport::AllGather(const Call& call, const void* in, void* out,
                                 const std::vector<Block>& blocks) {
  const GroupHosts hosts = Begin(call);
  const Block own = Run(call.me, blocks[call.me].Bytes());
  CopyBlock(in, own, out, blocks[call.me]);
  Gather({links_, call, hosts}, {in, own}, out, blocks);
}

void MessageTransport::Gather(const Setting& setting, const Part& own, void* out,
                              const std::vector<Block>& blocks) {
  Gathering gathering(setting, own, out, blocks, gather_scratch_);
  for (size_t chunk = 0; chunk < setting.CountOf(blocks); ++chunk) gathering.Post(chunk);
  gathering.Finish();
}

/// Returns the audiences of a broadcast tensor. For more than kScatteredBytes, there are two: the
/// members of all other hosts, so that the root's host sends the tensor only once over the network,
/// and the other members of the root's host. For fewer bytes, each other host is an audience, and
/// each other member of the root's host.
std::vector<Audience> AudiencesOf(const GroupHosts& hosts, int root, size_t bytes) {
  const bool together = bytes > kScatteredBytes;
  Audience away;
  std::vector<int> here;
  for (size_t host = 0; host < hosts.Count(); ++host) {
    if (host != hosts.HostOf(root)) away.push_back(hosts.hosts()[host]);
  }
  for (int member : hosts.hosts()[hosts.HostOf(root)]) {
    if (member != root) here.push_back(member);
  }
  std::vector<Audience> audiences;
  if (together && !away.empty()) audiences.push_back(away);
  if (together && !here.empty()) audiences.push_back({here});
  if (together) return audiences;
  for (const std::vector<int>& host : away) audiences.push_back({host});
  for (int member : here) audiences.push_back({{member}});
  return audiences;
}

/// Divides `bytes` at `data` into a part for each member of an audience: equally over hosts, and on
/// each host equally over its members.
std::vector<Part> PartsOf(const Audience& audience, void* data, size_t bytes) {
  std::vector<Part> parts;
  for (size_t host = 0; host < audience.size(); ++host) {
    const Range whole = PartOf(bytes, audience.size(), host);
    for (size_t i = 0; i < audience[host].size(); ++i) {
      const Range part = PartOf(whole.size, audience[host].size(), i);
      parts.push_back({data, Run(audience[host][i], part.size, whole.begin + part.begin)});
    }
  }
  return parts;
}

/// The root sends each member of an audience a part of the tensor, and the members of an audience
/// exchange their parts.
void MessageTransport::Broadcast(const Call& call, int root, void* data, size_t bytes) {
  const GroupHosts hosts = Begin(call);
  std::vector<Part> sends;
  for (const Audience& audience : AudiencesOf(hosts, root, bytes)) {
    const std::vector<Part> parts = PartsOf(audience, data, bytes);
    sends.insert(sends.end(), parts.begin(), parts.end());
    for (const Part& part : parts) {
      if (part.block.member != call.me) continue;
      Block mine = part.block;
      mine.member = root;
      Move(call, {}, {{data, mine}});
      GatherParts(call, parts);
    }
  }
  if (call.me == root) Move(call, sends, {});
}

/// Exchanges the parts of an audience, of which this rank is a member: an AllGather whose group is
/// the audience.
void MessageTransport::GatherParts(const Call& call, const std::vector<Part>& parts) {
  if (parts.size() == 1) return;
  std::vector<int> ranks;
  std::vector<Block> blocks;
  int me = 0;
  for (const Part& part : parts) {
    if (part.block.member == call.me) me = static_cast<int>(ranks.size());
    blocks.push_back(Run(static_cast<int>(ranks.size()), part.block.Bytes(), part.block.offset));
    ranks.push_back(call.ranks[part.block.member]);
  }
  const Call among{ranks, me, call.key};
  const GroupHosts hosts(ranks, me, links_.hosts);
  void* const data = At(parts[me].base, 0);
  Gather({links_, among, hosts}, {data, blocks[me]}, data, blocks);
}

void MessageTransport::Exchange(const Call& call, const void* in, const std::vector<Block>& sends,
                                void* out, const std::vector<Block>& receives) {
  Begin(call);
  for (const Block& from : sends) {
    if (from.member != call.me) continue;
    for (const Block& to : receives) {
      if (to.member == call.me) CopyBlock(in, from, out, to);
    }
  }
  Move(call, PartsAt(in, sends, call), PartsAt(out, receives, call));
}

void MessageTransport::Move(const Call& call, const std::vector<Part>& sends,
                            const std::vector<Part>& receives) {
  const Cut cut = Cut::WithRoom(links_, call.ranks.size());
  Chunks chunks(links_, call, kMove, cut, sends, receives, move_scratch_);
  chunks.Move();
  chunks.WaitUntilReceived();
}

}  // namespace

std::unique_ptr<Transport> ConnectRanks(int rank, int size, Store& store, const Network& network,
                                        std::chrono::milliseconds timeout,
                                        const std::vector<int>& simulated) {
  return std::make_unique<MessageTransport>(rank, size, store, network, timeout, simulated);
}

}  // namespace onnxpar
