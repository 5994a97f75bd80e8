#include "host_stages.h"

#include <algorithm>
#include <utility>

#include "ort.h"

namespace onnxpar {
namespace {

Block For(int member, Block block) {
  block.member = member;
  return block;
}

/// Returns the reduction inside a host. A mean divides the host's sum by the number of members of
/// the largest host already here, so that a float16 sum overflows only if the result would.
Reduction Inside(Reduction reduction, const GroupHosts& hosts) {
  if (reduction.op == ReduceOp::kMean) reduction.divisor = static_cast<double>(hosts.Largest());
  return reduction;
}

/// Returns the reduction between hosts. A mean does here the rest of the division.
Reduction Between(Reduction reduction, const GroupHosts& hosts) {
  reduction.divisor = static_cast<double>(hosts.Members()) / static_cast<double>(hosts.Largest());
  return reduction;
}

std::vector<Part> OwnToHandlers(const Setting& setting, const Part& own) {
  std::vector<Part> parts;
  for (size_t host = 0; host < setting.hosts.Count(); ++host) {
    if (host == setting.hosts.own()) continue;
    const int handler = setting.hosts.Handler(setting.call.me, host);
    parts.push_back({own.base, For(handler, own.block)});
  }
  return parts;
}

std::vector<Part> FromOwners(const Setting& setting, void* out, const std::vector<Block>& blocks) {
  std::vector<Part> parts;
  for (int owner : setting.hosts.HandledBy(setting.call.me)) {
    if (owner != setting.call.me && setting.hosts.HostOf(owner) != setting.hosts.own()) {
      parts.push_back({out, For(owner, blocks[owner])});
    }
  }
  return parts;
}

std::vector<Part> HandledToLocals(const Setting& setting, const Part& own, void* out,
                                  const std::vector<Block>& blocks) {
  std::vector<Part> parts;
  for (int local : setting.hosts.locals()) {
    if (local == setting.call.me) continue;
    for (int owner : setting.hosts.HandledBy(setting.call.me)) {
      const bool mine = owner == setting.call.me;
      parts.push_back({mine ? own.base : out, For(local, mine ? own.block : blocks[owner])});
    }
  }
  return parts;
}

std::vector<Part> HandledFromLocals(const Setting& setting, void* out,
                                    const std::vector<Block>& blocks) {
  std::vector<Part> parts;
  for (int local : setting.hosts.locals()) {
    if (local == setting.call.me) continue;
    for (int owner : setting.hosts.HandledBy(local)) {
      parts.push_back({out, For(local, blocks[owner])});
    }
  }
  return parts;
}

}  // namespace

Setting::Setting(Links& links, const Call& call, const GroupHosts& hosts)
    : links(links),
      call(call),
      hosts(hosts),
      cut(Cut::WithRoom(links, hosts.PiecesOfStep())),
      lag(hosts.Count() > 1 ? 1 : 0) {}

size_t Setting::CountOf(const std::vector<Block>& blocks) const {
  size_t count = 0;
  for (const Block& block : blocks) count = std::max(count, cut.CountOf(block));
  return count;
}

Reducing Reducing::ToOwners(const Setting& setting, const Reduction& reduction, const void* in,
                            const std::vector<Block>& blocks, void* out, StageScratch& scratch) {
  const GroupHosts& hosts = setting.hosts;
  const int me = setting.call.me;
  Plan plan;
  for (int owner : hosts.HandledBy(me)) {
    const bool mine = owner == me;
    plan.partials.push_back({blocks[owner], mine, {}});
    if (!mine) plan.partials.back().targets = {owner};
  }
  for (int local : hosts.locals()) {
    if (local == me) continue;
    for (int owner : hosts.HandledBy(local)) plan.sends.push_back({in, For(local, blocks[owner])});
  }
  for (size_t host = 0; host < hosts.Count(); ++host) {
    plan.sources.push_back(hosts.Handler(me, host));
  }
  plan.count = setting.CountOf(blocks);
  return {setting, reduction, in, std::move(plan), out, scratch};
}

Reducing Reducing::ToAll(const Setting& setting, const Reduction& reduction, const void* in,
                         size_t bytes, void* out, StageScratch& scratch) {
  const GroupHosts& hosts = setting.hosts;
  const int me = setting.call.me;
  Plan plan;
  plan.partials.push_back({onnxpar::Run(me, bytes), true, {}});
  for (int member = 0; member < setting.call.size(); ++member) {
    const bool local = hosts.HostOf(member) == hosts.own();
    if (local && member != me) plan.sends.push_back({in, onnxpar::Run(member, bytes)});
    if (!local && hosts.Counterpart(member, hosts.own()) == me) {
      plan.partials.front().targets.push_back(member);
    }
  }
  for (size_t host = 0; host < hosts.Count(); ++host) {
    plan.sources.push_back(host == hosts.own() ? me : hosts.Counterpart(me, host));
  }
  plan.count = setting.cut.CountOf(plan.partials.front().block);
  return {setting, reduction, in, std::move(plan), out, scratch};
}

Reducing::Reducing(const Setting& setting, const Reduction& reduction, const void* in, Plan plan,
                   void* out, StageScratch& scratch)
    : setting_(setting),
      inside_reduction_(Inside(reduction, setting.hosts)),
      between_reduction_(Between(reduction, setting.hosts)),
      in_(in),
      out_(out),
      plan_(std::move(plan)),
      own_(scratch.own),
      inside_(setting.links, setting.call, kReduceInside, setting.cut, plan_.sends, FromLocals(),
              scratch.inside),
      between_(setting.links, setting.call, kReduceBetween, setting.cut, ToTargets(), FromSources(),
               scratch.between) {}

/// Returns the parts that the other members of this host send to this one: from each, its operands
/// of the blocks that this member reduces.
std::vector<Part> Reducing::FromLocals() const {
  std::vector<Part> parts;
  for (int local : setting_.hosts.locals()) {
    if (local == setting_.call.me) continue;
    for (const Partial& partial : plan_.partials) {
      parts.push_back(Unplaced(local, partial.block.Bytes()));
    }
  }
  return parts;
}

/// True if this member reduces the block's operands of its host into memory of its own. False if it
/// is alone on its host: then it sends its operand to other hosts directly from `in`.
bool Reducing::MakesPartial(const Partial& partial) const {
  return partial.mine || setting_.hosts.locals().size() > 1 || inside_reduction_.divisor != 1;
}

std::vector<Part> Reducing::ToTargets() const {
  std::vector<Part> parts;
  for (const Partial& partial : plan_.partials) {
    const size_t bytes = partial.block.Bytes();
    for (int target : partial.targets) {
      if (partial.mine) {
        parts.push_back({out_, onnxpar::Run(target, bytes)});
      } else if (MakesPartial(partial)) {
        parts.push_back(Unplaced(target, bytes));
      } else {
        parts.push_back({in_, For(target, partial.block)});
      }
    }
  }
  return parts;
}

std::vector<Part> Reducing::FromSources() const {
  std::vector<Part> parts;
  for (int source : plan_.sources) {
    if (source != setting_.call.me) {
      parts.push_back(Unplaced(source, Mine().Bytes()));
    }
  }
  return parts;
}

const Block& Reducing::Mine() const {
  return std::find_if(plan_.partials.begin(), plan_.partials.end(),
                      [](const Partial& partial) { return partial.mine; })
      ->block;
}

void Reducing::Run(const std::function<void(size_t)>& after_chunk) {
  inside_.Post(0);
  for (size_t chunk = 0; chunk < plan_.count; ++chunk) {
    if (chunk + 1 < plan_.count) inside_.Post(chunk + 1);
    inside_.Wait(chunk);
    ReduceInside(chunk);
    inside_.Release(chunk);
    between_.Post(chunk);
    if (chunk < setting_.lag) continue;
    ReduceBetween(chunk - setting_.lag);
    after_chunk(chunk - setting_.lag);
  }
  for (size_t chunk = plan_.count - std::min(plan_.count, setting_.lag); chunk < plan_.count;
       ++chunk) {
    ReduceBetween(chunk);
    after_chunk(chunk);
  }
}

/// Returns the address of these bytes of this member's own operand, contiguous: in `in`, or copied
/// to scratch memory if the block has gaps.
const void* Reducing::OwnOperand(const Partial& partial, const Range& range) {
  if (partial.block.Contiguous()) return At(in_, partial.block.offset + range.begin);
  char* const packed = own_.Get(setting_.cut.piece);
  PackBlock(in_, partial.block, range, packed);
  return packed;
}

void Reducing::ReduceInside(size_t chunk) {
  const std::vector<int>& locals = setting_.hosts.locals();
  std::vector<const void*> sources(locals.size());
  size_t departing = 0;
  for (size_t i = 0; i < plan_.partials.size(); ++i) {
    const Partial& partial = plan_.partials[i];
    const Range range = setting_.cut.RangeOf(partial.block, chunk);
    const size_t target = departing;
    departing += partial.targets.size();
    if (!MakesPartial(partial)) continue;
    size_t others = 0;
    for (size_t k = 0; k < locals.size(); ++k) {
      const bool own = locals[k] == setting_.call.me;
      sources[k] = own ? OwnOperand(partial, range)
                       : inside_.Arrived(others++ * plan_.partials.size() + i, chunk);
    }
    Fold(inside_reduction_, sources.data(), sources.size(),
         partial.mine ? At(out_, range.begin) : between_.Departing(target, chunk),
         range.size / ElementSize(inside_reduction_.type));
  }
}

void Reducing::ReduceBetween(size_t chunk) {
  if (setting_.hosts.Count() == 1) return;
  between_.Wait(chunk);
  const Range range = setting_.cut.RangeOf(Mine(), chunk);
  std::vector<const void*> sources;
  size_t arrived = 0;
  for (int source : plan_.sources) {
    const bool own = source == setting_.call.me;
    sources.push_back(own ? At(out_, range.begin) : between_.Arrived(arrived++, chunk));
  }
  Fold(between_reduction_, sources.data(), sources.size(), At(out_, range.begin),
       range.size / ElementSize(between_reduction_.type));
  between_.Release(chunk);
}

Gathering::Gathering(const Setting& setting, const Part& own, void* out,
                     const std::vector<Block>& blocks, StageScratch& scratch)
    : setting_(setting),
      count_(setting.CountOf(blocks)),
      between_(setting.links, setting.call, kGatherBetween, setting.cut,
               OwnToHandlers(setting, own), FromOwners(setting, out, blocks), scratch.between),
      inside_(setting.links, setting.call, kGatherInside, setting.cut,
              HandledToLocals(setting, own, out, blocks), HandledFromLocals(setting, out, blocks),
              scratch.inside) {}

void Gathering::Post(size_t chunk) {
  between_.Post(chunk);
  if (chunk >= setting_.lag) PostInside(chunk - setting_.lag);
}

void Gathering::PostInside(size_t chunk) {
  between_.Wait(chunk);
  inside_.Post(chunk);
  if (chunk > 0) inside_.Wait(chunk - 1);
}

void Gathering::Finish() {
  if (count_ == 0) return;
  for (size_t chunk = count_ - std::min(count_, setting_.lag); chunk < count_; ++chunk) {
    PostInside(chunk);
  }
  inside_.Wait(count_ - 1);
}

}  // namespace onnxpar
