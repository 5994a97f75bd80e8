// The worlds of this process, by id.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

#include "world.h"

namespace onnxpar {
namespace {

std::mutex worlds_mutex;
std::atomic<pid_t> process{0};  // the process that joined the worlds

std::map<std::string, std::shared_ptr<World>>& Worlds() {
  static auto* worlds = new std::map<std::string, std::shared_ptr<World>>;  // outlives all threads
  return *worlds;
}

/// Called when the process ends: leaves all worlds, so that the other ranks can tell this from a
/// crash. Does nothing in a forked child, which has not joined them.
void LeaveWorldsAtExit() {
  if (getpid() != process) return;
  std::lock_guard<std::mutex> lock(worlds_mutex);
  for (const auto& [id, world] : Worlds()) world->LeaveAtExit();
}

void CheckConfig(const WorldConfig& config) {
  if (config.size < 1 || config.rank < 0 || config.rank >= config.size) {
    throw std::runtime_error("rank " + std::to_string(config.rank) + " is not in a world of " +
                             std::to_string(config.size) + " ranks");
  }
  if (config.timeout.count() <= 0) throw std::runtime_error("the timeout must be above 0");
  if (config.bind_address == "0.0.0.0" || config.bind_address == "::") {
    throw std::runtime_error("bind address " + config.bind_address +
                             " is not an address that other ranks can reach; give this host's own");
  }
}

}  // namespace

std::shared_ptr<World> World::Create(const WorldConfig& config) {
  CheckConfig(config);
  if (Find(config.id))
    throw std::runtime_error("this process already has a world '" + config.id + "'");
  static const bool at_exit [[maybe_unused]] = std::atexit(LeaveWorldsAtExit) == 0;
  process = getpid();
  auto world = std::make_shared<World>(config);
  std::lock_guard<std::mutex> lock(worlds_mutex);
  Worlds()[config.id] = world;
  return world;
}

std::shared_ptr<World> World::Find(const std::string& id) {
  std::lock_guard<std::mutex> lock(worlds_mutex);
  const auto found = Worlds().find(id);
  return found == Worlds().end() ? nullptr : found->second;
}

bool World::Destroy(const std::string& id) {
  std::shared_ptr<World> world;
  {
    std::lock_guard<std::mutex> lock(worlds_mutex);
    const auto found = Worlds().find(id);
    if (found == Worlds().end()) return false;
    world = std::move(found->second);
    Worlds().erase(found);
  }
  world->Close();
  return true;
}

}  // namespace onnxpar
