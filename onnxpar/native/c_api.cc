// The C interface that onnxpar.runtime.ranks.groups and onnxpar.runtime.ranks.collectives call
// through ctypes.
//
// Functions return 0 on success and 1 on failure; then onnxpar_last_error() returns the reason.
#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bell.h"
#include "hub.h"
#include "this_cpu.h"
#include "world.h"

#define ONNXPAR_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

thread_local std::string last_error;
thread_local std::string reason;

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

std::shared_ptr<onnxpar::World> WorldNamed(const char* id) {
  const auto world = onnxpar::World::Find(id);
  if (!world) throw std::runtime_error("this process has no world '" + std::string(id) + "'");
  return world;
}

/// Ranks of a world that callers use like a world of their own.
struct Subset {
  std::string world;
  std::vector<int64_t> ranks;
};

std::mutex subsets_mutex;

std::map<std::string, Subset>& Subsets() {
  static auto* subsets = new std::map<std::string, Subset>;
  return *subsets;
}

/// The subset of this id, or all ranks of the world of this id.
Subset SubsetNamed(const char* id) {
  std::lock_guard<std::mutex> lock(subsets_mutex);
  const auto found = Subsets().find(id);
  return found == Subsets().end() ? Subset{id, {}} : found->second;
}

std::mutex hubs_mutex;

std::map<std::string, std::shared_ptr<onnxpar::Hub>>& Hubs() {
  static auto* hubs = new std::map<std::string, std::shared_ptr<onnxpar::Hub>>;
  return *hubs;
}

}  // namespace

/// Returns the message of this thread's last failure; valid until the thread's next call.
ONNXPAR_EXPORT const char* onnxpar_last_error() { return last_error.c_str(); }

/// Joins a world of `size` ranks as `rank`; `id` names the world in this process.
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

/// Connects the ranks of a world in `count` streams; see World::OpenStreams.
ONNXPAR_EXPORT int onnxpar_world_open_streams(const char* id, int count) {
  return Guard([&] { WorldNamed(id)->OpenStreams(static_cast<size_t>(count)); });
}

/// Leaves a world; collectives of its sessions fail from then on.
ONNXPAR_EXPORT int onnxpar_world_destroy(const char* id) {
  return Guard([&] {
    if (!onnxpar::World::Destroy(id)) {
      throw std::runtime_error("this process has no world '" + std::string(id) + "'");
    }
  });
}

/// Sets the reason for which this rank is going to leave a world too early, for the errors of other
/// ranks.
ONNXPAR_EXPORT int onnxpar_world_explain(const char* id, const char* why) {
  return Guard([&] { WorldNamed(id)->Explain(why); });
}

/// Makes every running and later collective of a world fail with `message` on all ranks.
ONNXPAR_EXPORT int onnxpar_world_abort(const char* id, const char* message) {
  return Guard([&] { WorldNamed(id)->Abort(message); });
}

/// Sets `shared` to 1 if messages to rank `other` go through memory that both ranks share, else to
/// 0.
ONNXPAR_EXPORT int onnxpar_world_shares_memory(const char* id, int other, int* shared) {
  return Guard([&] { *shared = WorldNamed(id)->SharesMemoryWith(other) ? 1 : 0; });
}

/// Marks the start of a call on this rank; see World::Begin.
ONNXPAR_EXPORT int onnxpar_world_begin(const char* id) {
  return Guard([&] { WorldNamed(id)->Begin(); });
}

/// Makes every collective of this call fail with `message` until all ranks have called
/// onnxpar_world_renew.
ONNXPAR_EXPORT int onnxpar_world_interrupt(const char* id, const char* message) {
  return Guard([&] { WorldNamed(id)->Interrupt(message); });
}

/// Waits until all ranks have left the interrupted run, and connects to them again; then
/// onnxpar_reason() returns, in this thread, the reason, the same on all ranks. Fails if the
/// world was aborted.
ONNXPAR_EXPORT int onnxpar_world_renew(const char* id) {
  return Guard([&] { reason = WorldNamed(id)->Renew(); });
}

/// Makes onnxpar_reason() return, in this thread, the reason why a world has failed for good; "" if
/// it has not failed.
ONNXPAR_EXPORT int onnxpar_world_failure(const char* id) {
  return Guard([&] { reason = WorldNamed(id)->Failure(); });
}

ONNXPAR_EXPORT const char* onnxpar_reason() { return reason.c_str(); }

/// The level of x86-64 for which this process runs loops; 1 on other processors.
ONNXPAR_EXPORT int onnxpar_cpu_level() { return onnxpar::CpuLevel(); }

/// Makes `count` ranks of a world known in this process as `id`, for the collectives of arrays.h.
/// This rank must be one of them.
ONNXPAR_EXPORT int onnxpar_group_create(const char* world, const char* id, const int64_t* ranks,
                                        int count) {
  return Guard([&] {
    const Subset subset{world, {ranks, ranks + count}};
    WorldNamed(world)->GroupOf(subset.ranks);  // throws unless the ranks can be a group
    std::lock_guard<std::mutex> lock(subsets_mutex);
    Subsets()[id] = subset;
  });
}

/// Forgets a group.
ONNXPAR_EXPORT int onnxpar_group_destroy(const char* id) {
  return Guard([&] {
    std::lock_guard<std::mutex> lock(subsets_mutex);
    Subsets().erase(id);
  });
}

/// An array in C order, and the name of the collective. `world` is the id of a world or a group,
/// `type` a number of TensorProto.DataType.
struct onnxpar_array {
  const char* world;
  const char* name;
  const char* details;
  const int64_t* shape;
  const void* data;
  int dimensions;
  int type;

  onnxpar::Array Checked() const {
    const Subset subset = SubsetNamed(world);
    return {WorldNamed(subset.world.c_str()),
            subset.ranks,
            name,
            details,
            static_cast<onnxpar::DataType>(type),
            {shape, shape + dimensions},
            data};
  }
};

// The collectives of arrays.h. `rows` and `splits` have one entry for each rank.

ONNXPAR_EXPORT int onnxpar_all_reduce(const onnxpar_array* x, const char* op, void* out) {
  return Guard([&] { onnxpar::AllReduceArray(x->Checked(), op, out); });
}

ONNXPAR_EXPORT int onnxpar_reduce_scatter(const onnxpar_array* x, const char* op, void* out) {
  return Guard([&] { onnxpar::ReduceScatterArray(x->Checked(), op, out); });
}

ONNXPAR_EXPORT int onnxpar_all_gather(const onnxpar_array* x,
                                      void* (*allocate)(const int64_t* rows)) {
  return Guard([&] { onnxpar::AllGatherArray(x->Checked(), allocate); });
}

ONNXPAR_EXPORT int onnxpar_all_to_all(const onnxpar_array* x, const int64_t* splits,
                                      void* (*allocate)(const int64_t* rows)) {
  return Guard([&] {
    const onnxpar::Array array = x->Checked();
    onnxpar::AllToAllArray(array, {splits, splits + array.GroupSize()}, allocate);
  });
}

ONNXPAR_EXPORT int onnxpar_broadcast(const onnxpar_array* x, int root, void* out) {
  return Guard([&] { onnxpar::BroadcastArray(x->Checked(), root, out); });
}

ONNXPAR_EXPORT int onnxpar_barrier(const char* world, const char* name) {
  return Guard([&] {
    const int64_t shape[] = {0};
    const int type = static_cast<int>(onnxpar::DataType::kBool);
    const onnxpar_array nothing{world, name, "", shape, nullptr, 1, type};
    onnxpar::Barrier(nothing.Checked());
  });
}

/// Serves the hub of one world from this process, which need not be a rank. Listens on `host`; sets
/// `port` to a free port if it is 0. The ranks join at the store tcp://host:port#key, and fail when
/// this process ends.
ONNXPAR_EXPORT int onnxpar_hub_start(const char* host, int* port, const char* key) {
  return Guard([&] {
    const auto hub = onnxpar::Hub::Start({host, *port}, onnxpar::CredentialsOf(key), -1);
    *port = hub->address().port;
    std::lock_guard<std::mutex> lock(hubs_mutex);
    Hubs()[std::string(host) + ":" + std::to_string(*port)] = hub;
  });
}

/// Ends a hub normally.
ONNXPAR_EXPORT int onnxpar_hub_stop(const char* host, int port) {
  return Guard([&] {
    std::shared_ptr<onnxpar::Hub> hub;
    {
      std::lock_guard<std::mutex> lock(hubs_mutex);
      hub = std::move(Hubs()[std::string(host) + ":" + std::to_string(port)]);
      Hubs().erase(std::string(host) + ":" + std::to_string(port));
    }
    if (!hub) throw std::runtime_error("this process has no hub at that address");
    hub->Stop();
  });
}

/// Rings the bell in shared memory at this address; wakes sleepers if the count is now at least
/// `awaited`.
ONNXPAR_EXPORT void onnxpar_bell_ring(void* bell, uint32_t awaited) {
  static_cast<onnxpar::Bell*>(bell)->Ring(awaited);
}

/// Waits until the bell was rung `count` times; returns 1, or 0 after `longest_ms`.
ONNXPAR_EXPORT int onnxpar_bell_wait(void* bell, uint32_t count, int spins, int64_t longest_ms) {
  const std::chrono::milliseconds longest(longest_ms);
  return static_cast<onnxpar::Bell*>(bell)->Wait(count, spins != 0, longest) ? 1 : 0;
}
