// The messages of the control channel. Each message lists its fields once, in Visit, for both the
// writer and the reader; the reader checks each field.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace onnxpar {

/// The version of the protocol; increase it with every change to the messages.
constexpr uint64_t kProtocol = 6;
/// The largest number of ranks in a world.
constexpr uint64_t kMaxWorld = 1 << 16;
/// Stands for the awaited rank if a rank waits for none.
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

/// Received bytes that are not a valid message.
class ProtocolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A received message before any check; kind and content may be anything.
struct Frame {
  uint8_t kind = 0;
  std::string fields;
};

/// The owner of a connection, rank `rank` in a world of `size` ranks; used to check ranks in
/// messages.
struct Scope {
  int size = 0;
  int rank = 0;
};

/// The ranks of a group, and its stream.
using GroupId = std::pair<std::vector<int>, uint64_t>;
/// The number of collectives that a rank has begun, by group.
using Runs = std::map<GroupId, uint64_t>;

/// Writes a frame: its length, its kind, and its fields.
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

/// Reads a frame. Each method reads the next field, and throws ProtocolError if it is invalid.
class Reader {
 public:
  Reader(const Frame& frame, Scope scope) : bytes_(frame.fields), scope_(scope) {}
  void Number(uint64_t& value);
  void Flag(bool& value);
  void Wait(std::chrono::milliseconds& value);
  void Text(std::string& text) { Bytes(text, kMaxText); }
  void Key(std::string& key) { Bytes(key, kMaxKey); }
  void Bytes(std::string& bytes, size_t longest = SIZE_MAX);
  /// Reads distinct ranks of the world that include the rank of this connection.
  void Group(std::vector<int>& ranks);
  void Stream(uint64_t& stream);
  /// Reads a number for each of `ranks`, or no numbers.
  void PerMember(std::vector<int64_t>& values, const std::vector<int>& ranks);
  void GroupRuns(Runs& runs);
  /// Throws unless the frame ends here.
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

/// Reads a message from a frame, whose kind the caller has checked. Throws ProtocolError.
template <typename Message>
Message Decode(const Frame& frame, Scope scope) {
  Reader reader(frame, scope);
  Message message;
  message.Visit(reader);
  reader.End();
  return message;
}

namespace messages {

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

/// Stores a value on the hub for other ranks.
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

/// A rank's report on its current collective.
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

/// This rank has been in a collective for longer than usual.
struct Waiting : Report {
  static constexpr Kind kKind = Kind::kWaiting;
};

/// This rank has been in a collective for longer than the timeout.
struct Overdue : Report {
  static constexpr Kind kKind = Kind::kOverdue;
};

/// Answers Ask: whether the rank has begun the collective, the text of its present state, and the
/// rank for which it waits.
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

/// The reason why the world fails.
struct Failure {
  std::string message;

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Text(message);
  }
};

/// Fails the world for good.
struct Abort : Failure {
  static constexpr Kind kKind = Kind::kAbort;
};

/// A call, and the reason why it ends.
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

/// Asks the hub to end a call on all ranks; on a rank that has begun a later call, this later call.
struct Interrupt : CallEnd {
  static constexpr Kind kKind = Kind::kInterrupt;
};

/// This rank has left the interrupted run.
struct Ready {
  static constexpr Kind kKind = Kind::kReady;
  uint64_t epoch = 0;

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Number(epoch);
  }
};

/// This rank leaves the world normally, after it has begun these numbers of collectives; `why` is
/// empty unless the rank has failed.
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

/// The Hello was valid.
struct Accept {
  static constexpr Kind kKind = Kind::kAccept;

  template <typename Fields>
  void Visit(Fields&) {}
};

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

struct Value {
  static constexpr Kind kKind = Kind::kValue;
  std::string key, value;

  template <typename Fields>
  void Visit(Fields& fields) {
    fields.Key(key);
    fields.Bytes(value);
  }
};

/// Asks a rank whether it has begun collective number `run` of a group.
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

/// The world has failed permanently.
struct Fail : Failure {
  static constexpr Kind kKind = Kind::kFail;
};

/// A call has ended because a rank interrupted it.
struct Stop : CallEnd {
  static constexpr Kind kKind = Kind::kStop;
};

/// All ranks have left the interrupted run.
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

/// The hub ends normally.
struct Goodbye {
  static constexpr Kind kKind = Kind::kGoodbye;

  template <typename Fields>
  void Visit(Fields&) {}
};

}  // namespace messages

using messages::Report;

}  // namespace onnxpar
