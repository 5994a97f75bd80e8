#include "world.h"

#include <gloo/rendezvous/hash_store.h>
#include <gloo/rendezvous/prefix_store.h>

#include <algorithm>
#include <set>
#include <stdexcept>

#include "gloo_transport.h"
#include "hash.h"

namespace onnxpar {
namespace {

std::mutex worlds_mutex;
std::map<std::string, std::shared_ptr<World>>& Worlds() {
  static auto* worlds = new std::map<std::string, std::shared_ptr<World>>;
  return *worlds;
}

gloo::rendezvous::HashStore& HashStoreOf(const std::string& name) {
  static auto* stores = new std::map<std::string, gloo::rendezvous::HashStore*>;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  auto& store = (*stores)[name];
  if (store == nullptr) store = new gloo::rendezvous::HashStore;
  return *store;
}

}  // namespace

std::string Operation::Describe() const {
  return name + " on " + TypeName(type) + ToText(shape) + (details.empty() ? "" : " with ") +
         details;
}

std::shared_ptr<World> World::Create(const WorldConfig& config) {
  auto world = std::make_shared<World>(config);
  std::lock_guard<std::mutex> lock(worlds_mutex);
  if (!Worlds().emplace(config.id, world).second) throw std::runtime_error("duplicate world");
  return world;
}

std::shared_ptr<World> World::Find(const std::string& id) {
  std::lock_guard<std::mutex> lock(worlds_mutex);
  auto found = Worlds().find(id);
  return found == Worlds().end() ? nullptr : found->second;
}

std::shared_ptr<World> World::FromEnvironment() { return nullptr; }

bool World::Destroy(const std::string& id) {
  std::shared_ptr<World> world;
  {
    std::lock_guard<std::mutex> lock(worlds_mutex);
    auto found = Worlds().find(id);
    if (found == Worlds().end()) return false;
    world = found->second;
    Worlds().erase(found);
  }
  world->Close();
  return true;
}

World::World(const WorldConfig& config) : config_(config) {
  if (config.size > 1) {
    transport_ = ConnectGloo(config.rank, config.size, HashStoreOf(config.store),
                             config.bind_address, config.timeout);
  }
}

World::~World() = default;

Group& World::GroupOf(const std::vector<int64_t>& ranks) {
  std::vector<int> members(ranks.begin(), ranks.end());
  if (members.empty()) {
    for (int rank = 0; rank < size(); ++rank) members.push_back(rank);
  }
  for (int member : members) {
    if (member < 0 || member >= size()) {
      throw std::runtime_error("group " + ToText(members) + " names rank " +
                               std::to_string(member) + ", but the world has ranks 0 to " +
                               std::to_string(size() - 1));
    }
  }
  if (std::set<int>(members.begin(), members.end()).size() != members.size()) {
    throw std::runtime_error("group " + ToText(members) + " names a rank twice");
  }
  const auto me = std::find(members.begin(), members.end(), rank());
  if (me == members.end()) {
    throw std::runtime_error("group " + ToText(members) + " lacks this rank, " +
                             std::to_string(rank()) + "; is this the graph of another rank?");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Group>& group = groups_[members];
  if (!group) {
    group = std::make_unique<Group>();
    group->ranks = members;
    group->me = static_cast<int>(me - members.begin());
    group->hash = Mix(0, members);
  }
  return *group;
}

uint64_t World::Enter(const Operation& operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.empty()) throw WorldFailure(operation.name + ": " + failure_);
  Group& group = operation.group;
  return Mix(Mix(group.hash, group.runs++), operation.signature);
}

void World::Leave() {}

void World::Fail(const Operation& operation, const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.empty()) failure_ = error;
  throw WorldFailure(operation.name + ": " + failure_);
}

void World::Reject(const std::string& name, const std::string& reason) {
  Abort(name + " on rank " + std::to_string(rank()) + ": " + reason);
  throw WorldFailure(name + " on rank " + std::to_string(rank()) + ": " + reason);
}

void World::Abort(const std::string& message) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty()) failure_ = message;
  }
  if (transport_) transport_->Abort();
}

void World::Close() {
  Abort("the world is closed");
  std::lock_guard<std::mutex> lock(run_mutex_);
  transport_.reset();
}

}  // namespace onnxpar
