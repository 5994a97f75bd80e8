// World: one rank's membership in a world, the ranks that run collectives together.
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

#include "control.h"
#include "slow_link.h"
#include "stream.h"

namespace onnxpar {

struct WorldConfig {
  std::string id;  // unique in this process
  int rank = 0;
  int size = 1;
  std::string store;  // see Rendezvous::Open
  std::string bind_address;
  std::chrono::milliseconds timeout{60000};
};

/// The exception of a collective that fails, or cannot run, because the world has failed or the run
/// was interrupted. Its text is the reason.
class WorldFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One rank's membership in a world. Any thread may call any method. The collectives of one stream
/// run one at a time; a world has one stream until OpenStreams.
///
/// Ranks never wait for each other in a circle if all ranks start, run and complete collectives in
/// the same order, and members agree on the stream of each collective: then of all collectives that
/// wait, the first in this order can continue.
class World : public ControlListener {
 public:
  /// Joins the other ranks, registers the world under `config.id` in this process, and returns it.
  /// Throws if the ranks do not join within the timeout.
  static std::shared_ptr<World> Create(const WorldConfig& config);
  /// Returns the world registered under `id`, or null.
  static std::shared_ptr<World> Find(const std::string& id);
  /// Leaves the world registered under `id`; returns false if there is none.
  static bool Destroy(const std::string& id);

  explicit World(const WorldConfig& config);
  ~World() override;

  int rank() const { return config_.rank; }
  int size() const { return config_.size; }

  /// Returns the group of these ranks of the world in a stream; of all ranks if `ranks` is empty.
  /// Throws if ranks repeat, if they do not include this rank, or if there is no such stream.
  Group& GroupOf(const std::vector<int64_t>& ranks, int64_t stream = 0);

  /// Connects the ranks of the world in further streams, until there are `count`. All ranks must
  /// call it. In a world of n streams, a group of stream i runs in stream i modulo n.
  void OpenStreams(size_t count);

  /// Runs a collective: calls body(transport, call). Waits first until background jobs in its
  /// stream have ended. Throws a WorldFailure if the collective fails or cannot run.
  template <typename Body>
  void Run(const Operation& operation, const Body& body) {
    Stream& stream = StreamOf(operation.group);
    stream.background.Await();
    std::lock_guard<std::mutex> one_at_a_time(stream.run_mutex);
    const Running running(*this, stream, operation);
    try {
      body(*stream.transport, Call{operation.group.ranks, operation.group.me, running.key});
    } catch (const TransportError& error) {
      Fail(stream, operation, error.what());
    }
  }

  /// Adds a job that runs a collective of a group. The thread of the group's stream runs jobs one
  /// after the other, in the order in which they were added. A job must not throw.
  void InBackground(const Group& group, std::function<void()> job) {
    StreamOf(group).background.Add(std::move(job));
  }

  /// True if messages to rank `other` of the world go through memory that both ranks share. Throws
  /// if the world has no such rank.
  bool SharesMemoryWith(int other);

  /// Interrupts the current call on all ranks, because this rank cannot run the collective `name`,
  /// and throws a WorldFailure with the reason.
  [[noreturn]] void Reject(const std::string& name, const std::string& reason);
  /// Makes every collective of this world, current and later, fail with `message` on all ranks.
  void Abort(const std::string& message);
  /// Marks the start of a call (one run of the model) on this rank. Calls are counted, so that a
  /// rank that already fails in its next call does not interrupt this call on the others. Without
  /// Begin, all collectives count as one call.
  void Begin();
  /// Makes all collectives of the current call fail with `message`, on all ranks, until all ranks
  /// have called Renew.
  void Interrupt(const std::string& message);
  /// After an interrupted call: waits until all ranks have left it, and connects to them again.
  /// Returns the reason of the interruption, the same on all ranks. Throws if the world was
  /// aborted. If the ranks cannot connect, the next call fails with the reason.
  std::string Renew();
  /// Returns the reason why every collective fails from now on; "" if the world has not failed.
  std::string Failure();
  /// Stores the reason why this rank is about to leave the world too early, which the errors of
  /// other ranks quote.
  void Explain(const std::string& why);
  /// Leaves the world.
  void Close();
  /// Tells the other ranks that this rank leaves, but frees no threads and no memory, because the
  /// process is about to end.
  void LeaveAtExit();

 private:
  using Clock = std::chrono::steady_clock;

  void OnFailure(const std::string& reason) override;
  void OnInterrupt(uint64_t epoch, uint64_t call, const std::string& reason) override;
  void OnRenewed(uint64_t epoch, const std::string& reason) override;
  std::vector<Report> NewlySlow() override;
  Answer HasBegun(const GroupId& group, uint64_t run) override;

  void Connect();
  void Stop(const std::string& reason, bool for_good);
  std::shared_ptr<Transport> NewTransport(Control& control, size_t stream);
  std::shared_ptr<Control> Channel();
  Stream& StreamOf(const Group& group);
  std::vector<Stream*> Streams();
  uint64_t Enter(Stream& stream, const Operation& operation);
  void Leave(Stream& stream);
  std::string Explanation();

  struct Running {
    Running(World& in, Stream& of, const Operation& operation)
        : world(in), stream(of), key(in.Enter(of, operation)) {}
    ~Running() { world.Leave(stream); }
    World& world;
    Stream& stream;
    const uint64_t key;
  };

  [[noreturn]] void Fail(const Stream& stream, const Operation& operation,
                         const std::string& error);
  std::string FailureOf(const Operation& operation) const;
  Report ReportOf(const Stream& stream, const Operation& operation) const;
  static uint64_t AwaitedIn(const Stream& stream);
  onnxpar::Runs Runs();

  const WorldConfig config_;
  std::shared_ptr<SlowLink> link_;  // null without a simulated link

  std::mutex mutex_;                  // guards the members below
  std::shared_ptr<Control> control_;  // null with one rank, and after Close
  std::condition_variable changed_;
  std::string failure_;
  bool is_for_good_ = false;
  uint64_t epoch_ = 0;        // number of interrupted runs
  std::string interruption_;  // why the last run was interrupted
  std::string explanation_;   // why this rank leaves, if it has failed
  uint64_t call_ = 0;
  std::string next_failure_;  // reason why the next call has failed
  std::map<GroupId, std::unique_ptr<Group>> groups_;
  std::vector<std::unique_ptr<Stream>> streams_;  // the last member: its threads use the others
};

}  // namespace onnxpar
