// The plain C interface that onnxpar.runtime.groups binds.
//
// Functions return 0, or 1 after which onnxpar_last_error() tells this thread why.
#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "hub.h"
#include "world.h"

#define ONNXPAR_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

thread_local std::string last_error;

template <typename Body>
int Guard(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "unknown error";
  }
  return 1;
}

std::mutex hubs_mutex;

std::map<std::string, std::shared_ptr<onnxpar::Hub>>& Hubs() {
  static auto* hubs = new std::map<std::string, std::shared_ptr<onnxpar::Hub>>;
  return *hubs;
}

}  // namespace

/// The message of this thread's last failure; valid until its next call.
ONNXPAR_EXPORT const char* onnxpar_last_error() { return last_error.c_str(); }

/// Joins a world of `size` ranks as `rank`, to be known in this process as `id`.
ONNXPAR_EXPORT int onnxpar_world_create(const char* id, int rank, int size, const char* store,
                                        const char* bind_address, int64_t timeout_ms) {
  return Guard([&] {
    onnxpar::WorldConfig config;
    config.id = id;
    config.rank = rank;
    config.size = size;
    config.store = store;
    config.bind_address = bind_address;
    config.timeout = std::chrono::milliseconds(timeout_ms);
    onnxpar::World::Create(config);
  });
}

/// Leaves a world. Its sessions' collectives fail from then on.
ONNXPAR_EXPORT int onnxpar_world_destroy(const char* id) {
  return Guard([&] {
    if (!onnxpar::World::Destroy(id)) {
      throw std::runtime_error("no world '" + std::string(id) + "'");
    }
  });
}

/// Makes every running and later collective of a world, on all ranks, fail with `message`.
ONNXPAR_EXPORT int onnxpar_world_abort(const char* id, const char* message) {
  return Guard([&] {
    const auto world = onnxpar::World::Find(id);
    if (!world) throw std::runtime_error("no world '" + std::string(id) + "'");
    world->Abort(message);
  });
}

/// Serves the hub of one world from this process, which need not be a rank, on `host`; the ranks
/// join it at the store tcp://host:port. When this process ends, they fail.
ONNXPAR_EXPORT int onnxpar_hub_start(const char* host, int* port) {
  return Guard([&] {
    const auto hub = onnxpar::Hub::Start({host, *port}, /*key=*/"", /*host_rank=*/-1);
    *port = hub->address().port;
    std::lock_guard<std::mutex> lock(hubs_mutex);
    Hubs()[std::string(host) + ":" + std::to_string(*port)] = hub;
  });
}

/// Ends a hub in good order.
ONNXPAR_EXPORT int onnxpar_hub_stop(const char* host, int port) {
  return Guard([&] {
    std::shared_ptr<onnxpar::Hub> hub;
    {
      std::lock_guard<std::mutex> lock(hubs_mutex);
      hub = std::move(Hubs()[std::string(host) + ":" + std::to_string(port)]);
      Hubs().erase(std::string(host) + ":" + std::to_string(port));
    }
    if (!hub) throw std::runtime_error("no hub on this address");
    hub->Stop();
  });
}
