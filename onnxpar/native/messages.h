// The messages of the control channel between a rank and the hub. Each message lists its fields
// once, in Visit, which both writes and reads them; the reader checks each field.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace onnxpar {

/// The version of the protocol; increase it with every change to the messages, because ranks and
/// hub must have the same.
constexpr uint64_t kProtocol = 6;
/// The largest number of ranks in a world.
constexpr uint64_t kMaxWorld = 1 << 16;
/// The value of `awaited` if a rank waits for no other rank.
constexpr uint64_t kNobody = UINT64_MAX;
/// The largest number of streams of a rank.
constexpr uint64_t kMaxStreams = 64;
/// The largest number of bytes in a description or a reason. The sender cuts longer texts.
constexpr size_t kMaxText = 1 << 20;
/// The largest number of bytes in the key of a value.
constexpr size_t kMaxKey = 1024;
/// The longest timeout: a hundred years. A clock in nanoseconds overflows after 292 years.
constexpr std::chrono::milliseconds kMaxWait{3'155'760'000'000};

enum class Kind : uint8_t {
  // From a rank to the hub.
  kHello,
  kSet,
  kGet,
  kWaiting,
  kOverdue,
  kStatus,
  kAbort,
  kInterrupt,
  kReady,
  kLeave,
  // From the hub to a rank.
  kAccept,
  kRefuse,
  kWelcome,
  kValue,
  kAsk,
  kFail,
  kStop,
  kRenewed,
  kGoodbye,
};

/// The exception for received bytes that are not a valid message.
class ProtocolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A received message before any check: its kind may be unknown, and the bytes of its fields
/// invalid.
struct Frame {
  uint8_t kind = 0;
  std::string fields;
};

/// The rank and the world whose connection a message comes from: ranks in messages must be less
/// than `size`, and groups must contain `rank`.
struct Scope {
  int size = 0;
  int rank = 0;
};

/// A group: its ranks, and the stream in which it runs its collectives.
using GroupId = std::pair<std::vector<int>, uint64_t>;
/// The number of collectives that a rank has begun, by group.
using Runs = std::map<GroupId, uint64_t>;

/// Writes a message as a frame: its length, its kind, and the fields that Visit lists.
class Writer {
 public:
  explicit Writer(Kind kind);
  void Number(uint64_t value);
  void Flag(bool value) { Number(value ? 1 : 0); }
  void Wait(std::chrono::milliseconds value) { Number(static_cast<uint64_t>(value.count())); }
  void Text(const std::string& text);
  void Key(const std::string& key) { Bytes(key); }
  void Bytes(const std::string& bytes);
  void Group(const std::vector<int>& ranks);
  void Stream(uint64_t stream) { Number(stream); }
  void PerMember(const std::vector<int64_t>& values, const std::vector<int>& ranks);
  void GroupRuns(const Runs& runs);
  std::string Frame() const;

 private:
  std::string bytes_;
};

/// Reads the fields of a frame in the order of Visit. Each method reads the next field, and throws
/// ProtocolError if it is invalid.
class Reader {
 public:
  Reader(const Frame& frame, Scope scope) : bytes_(frame.fields), scope_(scope) {}
  void Number(uint64_t& value);
  void Flag(bool& value);
  void Wait(std::chrono::milliseconds& value);
  void Text(std::string& text) { Bytes(text, kMaxText); }
  void Key(std::string& key) { Bytes(key, kMaxKey); }
  void Bytes(std::string& bytes, size_t longest = SIZE_MAX);
  /// Reads the ranks of a group: distinct, less than the world's size, and including the rank of
  /// this connection.
  void Group(std::vector<int>& ranks);
  void Stream(uint64_t& stream);
  /// Reads one number for each of `ranks`, or an empty list.
  void PerMember(std::vector<int64_t>& values, const std::vector<int>& ranks);
  void GroupRuns(Runs& runs);
  /// Throws if the frame has further bytes.
  void End() const;

 private:
  uint64_t Count(size_t bytes_each);

  const std::string& bytes_;
  const Scope scope_;
  size_t position_ = 0;
};

template <typename Message>
std::string Encode(Message message) {
  Writer writer(Message::kKind);
  message.Visit(writer);
  return writer.Frame();
}

template <typename Message>
bool Is(const Frame& frame) {
  return frame.kind == static_cast<uint8_t>(Message::kKind);
}

/// Returns the message of this type in a frame, whose kind the caller has checked. Throws
/// ProtocolError if the frame is not valid.
template <typename Message>
Message Decode(const Frame& frame, Scope scope) {
  Reader reader(frame, scope);
  Message message;
  message.Visit(reader);
  reader.End();
  return message;
}

namespace messages {

/// The first message of a rank, which asks to join the world. The hub answers with Accept or
/// Refuse.
struct Hello {
  static constexpr Kind kKind = Kind::kHello;
  uint64_t protocol = kProtocol;
  uint64_t rank = 0;
  uint64_t size = 0;
  std::string process;  // e.g. pid 4711
  std::string host;
  std::chrono::milliseconds timeout{};
  std::chrono::milliseconds patience{};  // the rest of the timeout

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Number(protocol);
    fields.Number(rank);
    fields.Number(size);
    fields.Text(process);
    fields.Text(host);
    fields.Wait(timeout);
    fields.Wait(patience);
  }
};

/// Stores a value on the hub, where any rank can get it.
struct Set {
  static constexpr Kind kKind = Kind::kSet;
  std::string key, value;

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Key(key);
    fields.Bytes(value);
  }
};

/// Requests a value; the hub answers with Value as soon as the value is set.
struct Get {
  static constexpr Kind kKind = Kind::kGet;
  std::string key;

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Key(key);
  }
};

/// What a rank is doing in a collective that has not ended, for the hub's comparison with other
/// ranks.
struct Report {
  uint64_t epoch = 0;             // number of runs that were interrupted before
  std::vector<int> ranks;         // of the group
  uint64_t stream = 0;            // of the group
  uint64_t run = 0;               // number of collectives of this group before it
  uint64_t signature = 0;         // the same on members that agree
  std::vector<int64_t> sends;     // elements for each member, if they can differ
  std::vector<int64_t> receives;  // elements from each member
  std::string name;
  std::string description;
  uint64_t awaited = kNobody;  // the rank for whose message it waits

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Number(epoch);
    fields.Group(ranks);
    fields.Stream(stream);
    fields.Number(run);
    fields.Number(signature);
    fields.PerMember(sends, ranks);
    fields.PerMember(receives, ranks);
    fields.Text(name);
    fields.Text(description);
    fields.Number(awaited);
  }
};

/// Reports a collective that this rank has been in for longer than usual (20 ms).
struct Waiting : Report {
  static constexpr Kind kKind = Kind::kWaiting;
};

/// Reports a collective that this rank has been in for longer than the timeout.
struct Overdue : Report {
  static constexpr Kind kKind = Kind::kOverdue;
};

/// Answers Ask: whether this rank has begun the collective, what it does now (e.g. "in AllReduce
/// 'n'"), and the rank for which it waits.
struct Status {
  static constexpr Kind kKind = Kind::kStatus;
  uint64_t question = 0;
  bool begun = false;
  std::string doing;
  uint64_t awaited = kNobody;

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Number(question);
    fields.Flag(begun);
    fields.Text(doing);
    fields.Number(awaited);
  }
};

/// The content of messages that fail the world: the reason.
struct Failure {
  std::string message;

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Text(message);
  }
};

/// A rank asks the hub to fail the world for good, on all ranks.
struct Abort : Failure {
  static constexpr Kind kKind = Kind::kAbort;
};

/// The content of messages that end a call (one run of the model): its epoch and number, and the
/// reason.
struct CallEnd {
  uint64_t epoch = 0, call = 0;
  std::string message;

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Number(epoch);
    fields.Number(call);
    fields.Text(message);
  }
};

/// A rank asks the hub to end its current call on all ranks. A rank that has begun a later call
/// ends that one.
struct Interrupt : CallEnd {
  static constexpr Kind kKind = Kind::kInterrupt;
};

/// Tells the hub that this rank has left the interrupted run of this epoch.
struct Ready {
  static constexpr Kind kKind = Kind::kReady;
  uint64_t epoch = 0;

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Number(epoch);
  }
};

/// This rank leaves the world. `runs` is the number of collectives that it has begun, by group;
/// `why` is empty unless it has failed.
struct Leave {
  static constexpr Kind kKind = Kind::kLeave;
  std::string why;
  Runs runs;

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Text(why);
    fields.GroupRuns(runs);
  }
};

/// Answers a valid Hello: the rank belongs to the world, and Welcome follows when all ranks do.
struct Accept {
  static constexpr Kind kKind = Kind::kAccept;

  template <typename Fields>
  void Visit(Fields&) {}
};

/// Answers a Hello that the hub does not accept, with the reason.
struct Refuse {
  static constexpr Kind kKind = Kind::kRefuse;
  std::string message;
  bool again = false;  // a later attempt may succeed

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Text(message);
    fields.Flag(again);
  }
};

/// All ranks have joined the world.
struct Welcome {
  static constexpr Kind kKind = Kind::kWelcome;
  std::string server;  // the process that serves the hub

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Text(server);
  }
};

/// Answers Get, once a rank has set the value.
struct Value {
  static constexpr Kind kKind = Kind::kValue;
  std::string key, value;

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Key(key);
    fields.Bytes(value);
  }
};

/// Asks a rank whether it has begun collective number `run` of a group; the rank answers with
/// Status.
struct Ask {
  static constexpr Kind kKind = Kind::kAsk;
  uint64_t question = 0;
  std::vector<int> ranks;
  uint64_t stream = 0;
  uint64_t run = 0;

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Number(question);
    fields.Group(ranks);
    fields.Stream(stream);
    fields.Number(run);
  }
};

/// Tells the ranks that the world has failed for good.
struct Fail : Failure {
  static constexpr Kind kKind = Kind::kFail;
};

/// Tells the ranks that a call has ended, because a rank has interrupted it.
struct Stop : CallEnd {
  static constexpr Kind kKind = Kind::kStop;
};

/// Tells the ranks that all of them have left the interrupted run, and that a new epoch begins.
struct Renewed {
  static constexpr Kind kKind = Kind::kRenewed;
  uint64_t epoch = 0;   // the epoch that begins
  std::string message;  // why the last epoch ended

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Number(epoch);
    fields.Text(message);
  }
};

/// Tells the ranks that the hub ends without a failure.
struct Goodbye {
  static constexpr Kind kKind = Kind::kGoodbye;

  template <typename Fields>
  void Visit(Fields&) {}
};

}  // namespace messages

using messages::Report;

}  // namespace onnxpar
