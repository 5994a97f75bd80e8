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

/// A group: some ranks of a world, in the given order. Callers use its id in place of a world's.
struct Subset {
  std::string world;
  std::vector<int64_t> ranks;
};

std::mutex subsets_mutex;

std::map<std::string, Subset>& Subsets() {
  static auto* subsets = new std::map<std::string, Subset>;
  return *subsets;
}

/// Returns the group with this id; if there is none, `id` is the id of a world, and the subset has
/// no ranks, which stands for all ranks of the world.
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

/// Returns the message of the last function that failed in this thread; valid until this thread's
/// next call of the library.
ONNXPAR_EXPORT const char* onnxpar_last_error() { return last_error.c_str(); }

/// Joins a world of `size` ranks as `rank`, and waits for the other ranks. `id` is this process's
/// name for the world; `store` and `bind_address` are those of Rendezvous::Open.
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

/// Connects the ranks of a world in `count` streams, whose collectives can run at the same time;
/// see World::OpenStreams.
ONNXPAR_EXPORT int onnxpar_world_open_streams(const char* id, int count) {
  return Guard([&] { WorldNamed(id)->OpenStreams(static_cast<size_t>(count)); });
}

/// Leaves a world. From then on, the collectives of sessions that use the world fail.
ONNXPAR_EXPORT int onnxpar_world_destroy(const char* id) {
  return Guard([&] {
    if (!onnxpar::World::Destroy(id)) {
      throw std::runtime_error("this process has no world '" + std::string(id) + "'");
    }
  });
}

/// Stores the reason `why` this rank is about to leave a world early; other ranks' errors quote it.
ONNXPAR_EXPORT int onnxpar_world_explain(const char* id, const char* why) {
  return Guard([&] { WorldNamed(id)->Explain(why); });
}

/// Makes every running and later collective of a world fail with `message` on all ranks.
ONNXPAR_EXPORT int onnxpar_world_abort(const char* id, const char* message) {
  return Guard([&] { WorldNamed(id)->Abort(message); });
}

/// Sets `shared` to 1 if messages between this rank and rank `other` go through memory that both
/// share, or to 0 if they go over the network.
ONNXPAR_EXPORT int onnxpar_world_shares_memory(const char* id, int other, int* shared) {
  return Guard([&] { *shared = WorldNamed(id)->SharesMemoryWith(other) ? 1 : 0; });
}

/// Marks the start of a call (one run of the model) on this rank; see World::Begin.
ONNXPAR_EXPORT int onnxpar_world_begin(const char* id) {
  return Guard([&] { WorldNamed(id)->Begin(); });
}

/// Ends the current call on all ranks: its collectives fail with `message`, until all ranks have
/// called onnxpar_world_renew.
ONNXPAR_EXPORT int onnxpar_world_interrupt(const char* id, const char* message) {
  return Guard([&] { WorldNamed(id)->Interrupt(message); });
}

/// After an interrupted call: waits until all ranks have left the call, and connects to them again.
/// Then onnxpar_reason() in this thread returns the reason of the interruption, the same on all
/// ranks. Fails if the world was aborted.
ONNXPAR_EXPORT int onnxpar_world_renew(const char* id) {
  return Guard([&] { reason = WorldNamed(id)->Renew(); });
}

/// After this function, onnxpar_reason() in this thread returns the reason why a world has failed
/// for good, or "" if it has not failed.
ONNXPAR_EXPORT int onnxpar_world_failure(const char* id) {
  return Guard([&] { reason = WorldNamed(id)->Failure(); });
}

ONNXPAR_EXPORT const char* onnxpar_reason() { return reason.c_str(); }

/// Returns the level of x86-64 (1, 3 or 4) whose version of each loop this process runs; 1 on other
/// processors.
ONNXPAR_EXPORT int onnxpar_cpu_level() { return onnxpar::CpuLevel(); }

/// Gives the name `id` to a group of `count` ranks of a world, for the collectives of arrays.h. The
/// group must include this rank.
ONNXPAR_EXPORT int onnxpar_group_create(const char* world, const char* id, const int64_t* ranks,
                                        int count) {
  return Guard([&] {
    const Subset subset{world, {ranks, ranks + count}};
    WorldNamed(world)->GroupOf(subset.ranks);  // throws unless the ranks can be a group
    std::lock_guard<std::mutex> lock(subsets_mutex);
    Subsets()[id] = subset;
  });
}

/// Forgets the name of a group; the world is not affected.
ONNXPAR_EXPORT int onnxpar_group_destroy(const char* id) {
  return Guard([&] {
    std::lock_guard<std::mutex> lock(subsets_mutex);
    Subsets().erase(id);
  });
}

/// An array in C order, and the parameters that all collectives on arrays have. name the name of
/// the collective, on which all ranks must agree world the id of a world or of a group type a
/// number of TensorProto.DataType
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

/// Serves the hub of one world (where its ranks meet and report failures) in this process, which
/// need not be a rank. Listens on `host` and `port`; if the port is 0, takes a free port and stores
/// it there. Ranks join at the store tcp://host:port#key, and fail when this process ends.
ONNXPAR_EXPORT int onnxpar_hub_start(const char* host, int* port, const char* key) {
  return Guard([&] {
    const auto hub = onnxpar::Hub::Start({host, *port}, onnxpar::CredentialsOf(key), -1);
    *port = hub->address().port;
    std::lock_guard<std::mutex> lock(hubs_mutex);
    Hubs()[std::string(host) + ":" + std::to_string(*port)] = hub;
  });
}

/// Ends the hub that onnxpar_hub_start started at this host and port, without an error on its
/// ranks.
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

/// Adds one to the count of the bell at this address in shared memory; wakes the sleepers if the
/// count is now at least `awaited`. See Bell::Ring.
ONNXPAR_EXPORT void onnxpar_bell_ring(void* bell, uint32_t awaited) {
  static_cast<onnxpar::Bell*>(bell)->Ring(awaited);
}

/// Waits until the bell's count has reached `count`. Returns 1, or 0 after `longest_ms`
/// milliseconds. See Bell::Wait for `spins`.
ONNXPAR_EXPORT int onnxpar_bell_wait(void* bell, uint32_t count, int spins, int64_t longest_ms) {
  const std::chrono::milliseconds longest(longest_ms);
  return static_cast<onnxpar::Bell*>(bell)->Wait(count, spins != 0, longest) ? 1 : 0;
}
