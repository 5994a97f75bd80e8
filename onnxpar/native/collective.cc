#include "collective.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace onnxpar {
namespace {

std::string NameOf(const char* kind, const KernelInfo& info) {
  const std::string node = info.NodeName();
  return kind + (node.empty() ? "" : " '" + node + "'") + " (tag " +
         std::to_string(info.Int("tag")) + ")";
}

}  // namespace

Collective::Collective(const char* kind, const KernelInfo& info, std::shared_ptr<World> world)
    : world_(std::move(world)),
      group_(world_->GroupOf(info.IntsOrNone("group"), info.Int("stream", 0))),
      name_(NameOf(kind, info)),
      signature_(Mix(Mix(0, std::string(kind)), info.Int("tag"))) {
  NoteStream();
}

Collective::Collective(const char* kind, const KernelInfo& info, std::shared_ptr<World> world,
                       const std::vector<int64_t>& pair)
    : world_(std::move(world)),
      group_(world_->GroupOf(pair, info.Int("stream", 0))),
      name_(NameOf(kind, info)),
      signature_(Mix(Mix(0, std::string("message")), info.Int("tag"))) {
  NoteStream();
}

void Collective::NoteStream() {
  if (group_.stream > 0) AddDetail("stream", std::to_string(group_.stream));
}

void Collective::Compute(KernelContext& context) {
  try {
    Execute(context);
    context.Output(context.OutputCount() - 1, TokenShape(context));
  } catch (const WorldFailure&) {
    throw;
  } catch (const std::exception& error) {
    world_->Reject(name_, error.what());
  }
}

int64_t Collective::AgreeInt(const KernelInfo& info, const char* attribute) {
  const int64_t value = info.Int(attribute);
  Agree(attribute, value);
  return value;
}

std::string Collective::AgreeString(const KernelInfo& info, const char* attribute,
                                    const char* otherwise) {
  const std::string value = info.String(attribute, otherwise);
  AddDetail(attribute, value);
  signature_ = Mix(signature_, value);
  return value;
}

void Collective::Agree(const char* name, int64_t value) {
  AddDetail(name, std::to_string(value));
  signature_ = Mix(signature_, static_cast<uint64_t>(value));
}

std::vector<int64_t> Collective::AgreeSizes(const KernelInfo& info, const char* attribute) {
  const std::vector<int64_t> sizes = NoteSizes(info, attribute);
  signature_ = Mix(signature_, sizes);
  return sizes;
}

std::vector<int64_t> Collective::AgreeInts(const KernelInfo& info, const char* attribute) {
  const std::vector<int64_t> values = info.IntsOrNone(attribute);
  if (!values.empty()) AddDetail(attribute, ToText(values));
  signature_ = Mix(signature_, values);
  return values;
}

std::vector<int64_t> Collective::NoteSizes(const KernelInfo& info, const char* attribute) {
  const std::vector<int64_t> sizes = info.IntsOrNone(attribute);
  if (sizes.empty()) return sizes;
  AddDetail(attribute, ToText(sizes));
  const bool negative = std::any_of(sizes.begin(), sizes.end(), [](int64_t s) { return s < 0; });
  if (sizes.size() == group_.ranks.size() && !negative) return sizes;
  throw std::runtime_error(
      std::string(attribute) + "=" + ToText(sizes) + " must give a size >= 0 for each of the " +
      std::to_string(group_.ranks.size()) + " ranks of group " + ToText(group_.ranks));
}

void Collective::AddDetail(const char* attribute, const std::string& value) {
  details_ += (details_.empty() ? "" : ", ") + std::string(attribute) + "=" + value;
}

std::vector<int64_t> Collective::GatherNumbers(Transport& transport, const Call& call,
                                               const std::vector<int64_t>& own) {
  std::vector<int64_t> numbers(call.ranks.size() * own.size());
  const size_t bytes = own.size() * sizeof(int64_t);
  std::vector<Block> blocks;
  for (int member = 0; member < call.size(); ++member) {
    blocks.push_back(onnxpar::Run(member, bytes, member * bytes));
  }
  transport.AllGather({call.ranks, call.me, Mix(call.key, std::string("extents"))}, own.data(),
                      numbers.data(), blocks);
  return numbers;
}

std::vector<int64_t> Collective::GatherExtents(Transport& transport, const Call& call,
                                               int64_t extent) {
  return GatherNumbers(transport, call, {extent});
}

bool Collective::Alone(KernelContext& context, const Tensor& x) const {
  if (group_.ranks.size() > 1) return false;
  CopyTensor(x, context.Output(0, x.shape));
  return true;
}

void Collective::CopyTensor(const Tensor& x, void* y) {
  if (x.data != y && x.Bytes() > 0) std::memcpy(y, x.data, x.Bytes());
}

}  // namespace onnxpar
