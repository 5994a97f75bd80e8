#include "collective.h"

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
      group_(world_->GroupOf(info.IntsOrNone("group"))),
      name_(NameOf(kind, info)),
      signature_(Mix(Mix(0, std::string(kind)), info.Int("tag"))) {}

Collective::Collective(const char* kind, const KernelInfo& info, std::shared_ptr<World> world,
                       const std::vector<int64_t>& pair)
    : world_(std::move(world)),
      group_(world_->GroupOf(pair)),
      name_(NameOf(kind, info)),
      signature_(Mix(Mix(0, std::string("message")), info.Int("tag"))) {}

void Collective::Compute(KernelContext& context) {
  try {
    Execute(context);
    context.Output(context.OutputCount() - 1, Shape{0});
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

std::vector<int64_t> Collective::AgreeInts(const KernelInfo& info, const char* attribute) {
  const std::vector<int64_t> values = NoteInts(info, attribute);
  signature_ = Mix(signature_, values);
  return values;
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

std::vector<int64_t> Collective::NoteInts(const KernelInfo& info, const char* attribute) {
  const std::vector<int64_t> values = info.Ints(attribute);
  AddDetail(attribute, ToText(values));
  return values;
}

void Collective::AddDetail(const char* attribute, const std::string& value) {
  details_ += (details_.empty() ? "" : ", ") + std::string(attribute) + "=" + value;
}

bool Collective::Alone(const Tensor& x, void* y) const {
  if (group_.ranks.size() > 1) return false;
  if (x.data != y && x.Bytes() > 0) std::memcpy(y, x.data, x.Bytes());
  return true;
}

}  // namespace onnxpar
