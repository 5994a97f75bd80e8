// World: one rank's membership in a world.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "background.h"
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

/// The ranks that run a collective together, as this rank knows them.
struct Group {
  std::vector<int> ranks;
  int me = 0;
  uint64_t hash = 0;
  uint64_t runs = 0;  // collectives begun in this epoch; guarded by World::mutex_
};

/// A collective that a member wants to run, for checks and for messages.
struct Operation {
  const std::string& name;     // e.g. AllReduce 'node' (tag 3)
  const std::string& details;  // e.g. axis=0, sizes=[2, 3]
  Group& group;
  uint64_t signature;  // the same on members that agree
  DataType type;
  const Shape& shape;
  /// If they may differ between members: the numbers of elements that this member sends to and
  /// receives from each; else null.
  const std::vector<int64_t>* sends;
  const std::vector<int64_t>* receives;

  std::string Describe() const;
};

/// Thrown by a collective that did not run, because its world has failed or its run has been
/// interrupted; has the reason.
class WorldFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One rank's membership in a world. Any thread may call any method; collectives run one at a time.
class World : public ControlListener {
 public:
  /// Joins the other ranks, and registers the world under `config.id`. Throws if they do not join
  /// within the timeout.
  static std::shared_ptr<World> Create(const WorldConfig& config);
  /// Returns the world registered under `id`, or null.
  static std::shared_ptr<World> Find(const std::string& id);
  /// Leaves the world registered under `id`; returns false if there is none.
  static bool Destroy(const std::string& id);

  explicit World(const WorldConfig& config);
  ~World() override;

  int rank() const { return config_.rank; }
  int size() const { return config_.size; }

  /// Returns the group of these ranks of the world, of all ranks if `ranks` is empty. Throws unless
  /// they are distinct and include this rank.
  Group& GroupOf(const std::vector<int64_t>& ranks);

  /// Runs a collective: calls body(transport, call). Throws a WorldFailure with the reason if the
  /// collective fails or cannot run.
  /// First waits until those in the background have ended.
  template <typename Body>
  void Run(const Operation& operation, const Body& body) {
    background_.Await();
    std::lock_guard<std::mutex> one_at_a_time(run_mutex_);
    const Running running(*this, operation);
    try {
      body(*transport_, Call{operation.group.ranks, operation.group.me, running.key});
    } catch (const TransportError& error) {
      Fail(operation, error.what());
    }
  }

  /// Adds a job that runs a collective; a thread of this world runs these one after the other, in
  /// the order in which they were added. The job must not throw.
  void InBackground(std::function<void()> job) { background_.Add(std::move(job)); }

  /// True if messages to this rank of the world go through memory that both ranks share. Throws if
  /// the world has no such rank.
  bool SharesMemoryWith(int other);

  /// Interrupts the run, because this rank cannot run the collective `name`, and throws.
  [[noreturn]] void Reject(const std::string& name, const std::string& reason);
  /// Makes every collective of this world, current and later, fail with `message` on all ranks.
  void Abort(const std::string& message);
  /// Marks the start of a call on this rank, so that a rank that fails in its next call does not
  /// interrupt this one. Without Begin, everything counts as one call.
  void Begin();
  /// Makes every collective of this call fail with `message` on all ranks, until all have called
  /// Renew.
  void Interrupt(const std::string& message);
  /// Waits until all ranks have left the interrupted run, and connects to them again. Returns the
  /// reason of the interruption, the same on all ranks. Throws if the world was aborted. If the
  /// ranks cannot connect, the next call fails.
  std::string Renew();
  /// Leaves the world.
  void Close();
  /// Leaves the world without freeing its threads and memory, because the process is about to end.
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

  std::mutex mutex_;                  // guards the members below
  std::shared_ptr<Control> control_;  // null with one rank, and after Close
  std::shared_ptr<Transport> transport_;
  std::condition_variable changed_;
  std::string failure_;
  bool is_for_good_ = false;
  uint64_t epoch_ = 0;        // how many runs were interrupted
  std::string interruption_;  // why the last run was interrupted
  uint64_t call_ = 0;
  std::string next_failure_;  // reason why the next call has failed
  std::map<std::vector<int>, std::unique_ptr<Group>> groups_;
  const Operation* running_ = nullptr;
  Clock::time_point began_;
  bool reported_ = false;

  Background background_;  // the last member: its jobs use the others
};

}  // namespace onnxpar
