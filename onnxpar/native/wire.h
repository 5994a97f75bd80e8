// Messages of the control channel: frames of a length, a kind and fields, on a TCP socket.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace onnxpar {

/// Changes with every change to the frames.
constexpr uint64_t kProtocol = 2;

enum class Kind : uint8_t {
  // From a rank to the hub.
  kHello,      // protocol, key, rank, size, process, host, timeout, what is left of it (ms)
  kSet,        // key, value
  kGet,        // key; answered by kValue once it is set
  kWaiting,    // a Report: in a collective for longer than usual
  kOverdue,    // a Report: in a collective for longer than the timeout
  kStatus,     // answers kAsk: question, whether the rank has begun that collective, what it does
  kAbort,      // message: fails the world for good
  kInterrupt,  // epoch, call, message: ends that call, or the one in flight
  kReady,      // epoch: this rank has left the run that was interrupted
  kLeave,      // how often each group has run: (ranks, runs)...
  // From the hub to a rank.
  kAccept,   // the hello was right
  kRefuse,   // message, whether to try again
  kWelcome,  // who serves the hub: all ranks have joined
  kValue,    // key, value
  kAsk,      // question, ranks of a group, run: has this rank begun that collective?
  kFail,     // message: the world has failed for good
  kStop,     // epoch, call, message: that call has ended
  kRenewed,  // epoch that begins, message that ended the last: all ranks have left that run
  kGoodbye,  // the hub ends in good order
};

/// What a rank tells of the collective that it is in.
struct Report {
  uint64_t epoch = 0;             // how many runs were interrupted before
  std::vector<int> ranks;         // of the group
  uint64_t run = 0;               // the collectives that this group ran before
  uint64_t signature = 0;         // equal where members agree
  std::vector<int64_t> sends;     // what each member gets from this one, if that can differ
  std::vector<int64_t> receives;  // and this one from each
  std::string name;
  std::string description;
};

/// Builds one frame.
class Frame {
 public:
  explicit Frame(Kind kind);
  Frame& Add(uint64_t value);
  Frame& Add(const std::string& text);
  Frame& Add(const std::vector<int>& values);
  Frame& Add(const std::vector<int64_t>& values);
  Frame& Add(const Report& report);
  /// The frame as sent.
  std::string Bytes() const;

 private:
  std::string bytes_;
};

/// Reads the fields of one frame; throws where there are too few.
class Fields {
 public:
  explicit Fields(std::string frame) : bytes_(std::move(frame)) {}
  Kind kind() const { return static_cast<Kind>(bytes_[0]); }
  bool AtEnd() const { return position_ == bytes_.size(); }
  uint64_t Number();
  std::string Text();
  std::vector<int> Ints();
  std::vector<int64_t> Longs();
  Report ReadReport();

 private:
  std::string bytes_;  // kind, then fields
  size_t position_ = 1;
};

/// A TCP connection that carries frames; closed on destruction. It never blocks longer than asked.
class Connection {
 public:
  Connection() = default;
  explicit Connection(int descriptor);
  ~Connection();
  Connection(Connection&& other) noexcept;
  Connection& operator=(Connection&& other) noexcept;

  int descriptor() const { return descriptor_; }
  bool open() const { return descriptor_ >= 0; }
  void Close();

  /// Reads what has come. False at the end of the connection; frames that came before remain.
  bool Fill();
  /// The next complete frame; throws on one of absurd length.
  std::optional<Fields> Next();

  /// Queues a frame and writes as much as the socket takes.
  void Send(const Frame& frame);
  /// Writes what is queued; false if the connection is broken.
  bool Flush();
  bool wants_to_write() const { return !outgoing_.empty(); }

 private:
  int descriptor_ = -1;
  std::string incoming_;
  std::string outgoing_;
};

struct Address {
  std::string host;
  int port = 0;
};

/// Listens on `address`, on any free port if it names none, and sets the port. Throws
/// std::system_error.
int Listen(Address* address);

/// The name of this host.
std::string HostName();

/// Connects; a closed connection if nobody answers.
Connection Connect(const Address& address, std::chrono::milliseconds timeout);

}  // namespace onnxpar
