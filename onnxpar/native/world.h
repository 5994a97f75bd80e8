// One rank's membership in a world of ranks.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "control.h"
#include "ort.h"
#include "transport.h"

namespace onnxpar {

struct WorldConfig {
  std::string id;  // unique in this process
  int rank = 0;
  int size = 1;
  std::string store;  // see Rendezvous::Open
  std::string bind_address;
  std::chrono::milliseconds timeout{60000};
};

/// Ranks that run collectives together.
struct Group {
  std::vector<int> ranks;
  int me = 0;
  uint64_t hash = 0;
  uint64_t runs = 0;  // collectives begun; guarded by the world
};

/// One member's request of a collective, for checks and for messages.
struct Operation {
  const std::string& name;     // e.g. AllReduce 'node' (tag 3)
  const std::string& details;  // e.g. axis=0, sizes=[2, 3]
  Group& group;
  uint64_t signature;  // equal where members agree
  DataType type;
  const Shape& shape;
  /// If amounts may differ between members: those that this one sends to and receives from each.
  const std::vector<int64_t>* sends;
  const std::vector<int64_t>* receives;

  std::string Describe() const;
};

/// A collective that did not run, and why. The world it belongs to has failed, or its run has been
/// interrupted.
class WorldFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The world of one rank. Any thread may call any method; collectives run one at a time.
class World : public ControlListener {
 public:
  /// Joins the other ranks and makes the world known under `config.id`; throws within the timeout.
  static std::shared_ptr<World> Create(const WorldConfig& config);
  /// The world of that id, or null.
  static std::shared_ptr<World> Find(const std::string& id);
  /// Leaves the world of that id; false if there is none.
  static bool Destroy(const std::string& id);

  explicit World(const WorldConfig& config);
  ~World() override;

  int rank() const { return config_.rank; }
  int size() const { return config_.size; }

  /// The group of these world ranks, of all if there are none; throws unless they are distinct and
  /// this rank is one of them.
  Group& GroupOf(const std::vector<int64_t>& ranks);

  /// Calls body(transport, call), or throws a WorldFailure with the reason that stopped the
  /// collective.
  template <typename Body>
  void Run(const Operation& operation, const Body& body) {
    std::lock_guard<std::mutex> one_at_a_time(run_mutex_);
    const Running running(*this, operation);
    try {
      body(*transport_, Call{operation.group.ranks, operation.group.me, running.key});
    } catch (const TransportError& error) {
      Fail(operation, error.what());
    }
  }

  /// Ends the run because this rank cannot run the collective `name`, and throws.
  [[noreturn]] void Reject(const std::string& name, const std::string& reason);
  /// Makes every current and later collective of this world fail with that message on all ranks.
  void Abort(const std::string& message);
  /// Begins a call that all ranks make, so that a rank that is already in the next call does not
  /// interrupt this one. Without it, everything is one call.
  void Begin();
  /// Makes every collective of this call, on all ranks, fail until all have called Renew.
  void Interrupt(const std::string& message);
  /// Waits until all ranks have left the interrupted run, and connects them again. Returns the
  /// reason, the same on all ranks; throws if the world was aborted before. If they cannot connect,
  /// the next call fails.
  std::string Renew();
  /// Leaves the world.
  void Close();
  /// Leaves the world, but keeps its threads and memory: the process is about to end.
  void LeaveAtExit();

 private:
  using Clock = std::chrono::steady_clock;

  void OnFailure(const std::string& reason) override;
  void OnInterrupt(uint64_t epoch, uint64_t call, const std::string& reason) override;
  void OnRenewed(uint64_t epoch, const std::string& reason) override;
  std::optional<Report> NewlySlow() override;
  Answer HasBegun(const std::vector<int>& ranks, uint64_t run) override;

  void Connect();
  void Stop(const std::string& reason, bool for_good);
  std::shared_ptr<Transport> NewTransport(Control& control);
  std::shared_ptr<Control> Channel();
  uint64_t Enter(const Operation& operation);
  void Leave();

  struct Running {
    Running(World& in, const Operation& operation) : world(in), key(in.Enter(operation)) {}
    ~Running() { world.Leave(); }
    World& world;
    const uint64_t key;
  };

  [[noreturn]] void Fail(const Operation& operation, const std::string& error);
  std::string FailureOf(const Operation& operation) const;
  Report ReportOf(const Operation& operation) const;
  std::map<std::vector<int>, uint64_t> Runs();

  const WorldConfig config_;
  std::mutex run_mutex_;  // taken before mutex_

  std::mutex mutex_;                  // guards what follows
  std::shared_ptr<Control> control_;  // null in a world of one rank, and in one that has been left
  std::shared_ptr<Transport> transport_;
  std::condition_variable changed_;
  std::string failure_;
  bool is_for_good_ = false;
  uint64_t epoch_ = 0;        // how many runs were interrupted
  std::string interruption_;  // why the last one was
  uint64_t call_ = 0;
  std::string next_failure_;  // of the call after this one
  std::map<std::vector<int>, std::unique_ptr<Group>> groups_;
  const Operation* running_ = nullptr;
  Clock::time_point began_;
  bool reported_ = false;
};

}  // namespace onnxpar
