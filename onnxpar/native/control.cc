#include "control.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "diagnosis.h"

namespace onnxpar {
namespace {

using std::chrono::milliseconds;

/// The interval at which the channel's thread looks for slow collectives of this rank.
constexpr milliseconds kTick{20};
/// The time between two attempts to join.
constexpr milliseconds kRetry{10};
constexpr milliseconds kLookup{250};  // name servers refuse or delay answers to frequent questions
/// How long to wait for a hub's first answer. A hub answers at once: a program that does not answer
/// is no hub, or a hub that is stopping.
constexpr milliseconds kAcceptTime{1000};
/// Time beyond the timeout in which the hub can still send the reason why the world is incomplete.
constexpr milliseconds kGrace{500};

}  // namespace

Control::Control(int rank, int size, const std::string& store, const std::string& bind_address,
                 milliseconds timeout, ControlListener& listener)
    : scope_{size, rank}, bind_address_(bind_address), timeout_(timeout), listener_(listener) {
  const std::unique_ptr<Rendezvous> rendezvous = Rendezvous::Open(store, bind_address);
  try {
    Join(*rendezvous);
    wake_ = NewEvent();
  } catch (...) {
    if (hub_) rendezvous->Withdraw();
    StopHub();
    throw;
  }
  if (hub_) rendezvous->Withdraw();
  thread_ = std::thread([this] { Serve(); });
}

Control::~Control() {
  stop_ = true;
  eventfd_write(wake_, 1);
  thread_.join();
  close(wake_);
}

void Control::Join(Rendezvous& rendezvous) {
  const Clock::time_point until = Clock::now() + timeout_;
  Setback setback{Setback::Stage::kUnknown, "rank 0 has not joined the world"};
  std::optional<std::string> key;
  while (Clock::now() < until) {
    if (scope_.rank == 0 && !hub_) hub_ = rendezvous.Serve();
    const std::optional<HubAddress> hub = rendezvous.Find();
    if (hub && key != hub->key) network_.credentials = CredentialsOf(*(key = hub->key));
    Setback round;
    for (const Address& address : hub ? hub->addresses : std::vector<Address>()) {
      Setback here;
      if (TryJoin(address, until, &here)) return;
      if (here.stage > round.stage) round = here;
    }
    if (!round.why.empty() && round.stage >= setback.stage) setback = round;
    std::this_thread::sleep_for(kRetry);
  }
  throw std::runtime_error("rank " + std::to_string(scope_.rank) + " on host " + HostName() +
                           " has waited for " +
                           Seconds(std::chrono::duration<double>(timeout_).count()) +
                           " to join the world: " + setback.why);
}

/// Makes one attempt to join the world at this hub. Returns true on success. Returns false and sets
/// `setback` if another attempt may succeed; throws if none can.
bool Control::TryJoin(const Address& hub, Clock::time_point until, Setback* setback) {
  if (!Reach(hub, setback)) return false;
  network_.hub = hub;
  network_.listening = Listening();
  try {
    return AskToJoin(hub, until, setback);
  } catch (const ProtocolError&) {
    *setback = {Setback::Stage::kAnswered,
                "the program at " + hub.Text() + " is not a hub of onnxpar"};
    return false;
  }
}

/// Returns the host at which this rank listens for others: `bind_address`, if the user gave one,
/// else this end of the connection to the hub. A rank that serves the hub itself has no such
/// connection to other hosts, so it listens where the hub does.
std::string Control::Listening() const {
  if (!bind_address_.empty()) return bind_address_;
  return hub_ ? hub_->address().host : connection_.LocalHost();
}

/// Connects to the hub, and proves to it that this rank has the key, as the hub does in turn.
/// Returns false and sets `setback` on failure.
bool Control::Reach(const Address& hub, Setback* setback) {
  const Clock::time_point until = Clock::now() + kAcceptTime;
  TcpSocket socket;
  try {
    socket = TcpSocket::Connect(hub);
  } catch (const UnknownHost& unknown) {
    *setback = {Setback::Stage::kUnreachable, unknown.what()};
    std::this_thread::sleep_for(kLookup);
    return false;
  }
  auto handshake = Handshake::Connects(std::move(socket), network_.credentials, kHubPurpose, "");
  auto state = handshake.Advance();
  while (state == Handshake::State::kUnderWay && Clock::now() < until) {
    pollfd waiting{handshake.descriptor(), handshake.events(), 0};
    poll(&waiting, 1, static_cast<int>(kRetry.count()));
    state = handshake.Advance();
  }
  if (state == Handshake::State::kDone) {
    connection_ = Connection(handshake.Take());
    return true;
  }
  const std::string why =
      state == Handshake::State::kFailed ? handshake.error() : "it does not answer";
  if (handshake.connected()) {
    *setback = {Setback::Stage::kAnswered,
                "the process at " + hub.Text() + " has another key (ONNXPAR_KEY) " +
                    "or other certificates, or is no hub of onnxpar: " + why};
  } else {
    *setback = {Setback::Stage::kUnreachable,
                "rank 0 has not joined the world: nothing listens on " + hub.Text() +
                    ", or a firewall is between (" + why + ")"};
  }
  return false;
}

bool Control::AskToJoin(const Address& hub, Clock::time_point until, Setback* setback) {
  const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now());
  messages::Hello hello;
  hello.rank = static_cast<uint64_t>(scope_.rank);
  hello.size = static_cast<uint64_t>(scope_.size);
  hello.process = "pid " + std::to_string(getpid());
  hello.host = HostName();
  hello.timeout = timeout_;
  hello.patience = std::max(left, kRetry);
  Send(hello);
  std::optional<Frame> answer = Receive(std::min(until, Clock::now() + kAcceptTime));
  if (answer && Is<messages::Refuse>(*answer)) {
    const auto refusal = Read<messages::Refuse>(*answer);
    *setback = {Setback::Stage::kJoining, refusal.message};
    if (!refusal.again) throw std::runtime_error(setback->why);
    return false;
  }
  if (!answer || !Is<messages::Accept>(*answer)) {
    if (Clock::now() < until) {
      *setback = {Setback::Stage::kJoining, "no hub of onnxpar answers on " + hub.Text()};
    }
    return false;
  }
  answer = Receive(until + kGrace);
  if (answer && Is<messages::Welcome>(*answer)) {
    host_ = Read<messages::Welcome>(*answer).server;
    return true;
  }
  if (answer && Is<messages::Fail>(*answer)) {
    throw std::runtime_error(Read<messages::Fail>(*answer).message);
  }
  const char* how = Clock::now() < until + kGrace
                        ? " has ended"
                        : " does not respond: it is stopped, its host is gone, or the link to it "
                          "is cut";
  *setback = {Setback::Stage::kJoining, "the hub on " + hub.Text() + how};
  return false;
}

/// Waits for the next message of the hub and returns it; none if the connection ends or `until`
/// passes.
std::optional<Frame> Control::Receive(Clock::time_point until) {
  for (;;) {
    if (auto frame = connection_.Next()) return frame;
    const Clock::duration left = until - Clock::now();
    if (left <= Clock::duration::zero()) return {};
    const auto wait = std::chrono::duration_cast<milliseconds>(left) + milliseconds(1);
    pollfd waiting{connection_.descriptor(), POLLIN, 0};
    if (poll(&waiting, 1, PollTime(wait)) <= 0) return {};
    if (!connection_.Fill()) return connection_.Next();
  }
}

/// The channel's thread. Invalid messages and errors do not end the process: they fail the world,
/// with the reason.
void Control::Serve() {
  try {
    ServeUntilTheEnd();
  } catch (const ProtocolError& error) {
    const std::string reason =
        "rank " + std::to_string(scope_.rank) + " and " + host_ +
        ", which serves the control channel, use different protocols: " + error.what();
    Abort(reason);
    Fail(reason);
  } catch (const std::exception& error) {
    const std::string reason =
        "rank " + std::to_string(scope_.rank) + " has lost its control channel: " + error.what();
    Abort(reason);
    Fail(reason);
  }
}

void Control::ServeUntilTheEnd() {
  bool open = true;
  while (!stop_ && open) {
    short events = POLLIN;
    int descriptor = -1;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      descriptor = connection_.descriptor();
      if (connection_.wants_to_write()) events |= POLLOUT;
    }
    pollfd waiting[] = {{descriptor, events, 0}, {wake_, POLLIN, 0}};
    poll(waiting, 2, static_cast<int>(kTick.count()));
    std::vector<Frame> frames;
    bool overflowed = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      open = connection_.Fill();
      connection_.Flush();
      overflowed = connection_.overflowed();
      while (auto frame = connection_.Next()) frames.push_back(std::move(*frame));
    }
    for (const Frame& frame : frames) Handle(frame);
    for (const Report& report : listener_.NewlySlow()) Waiting(report);
    if (overflowed) throw std::runtime_error(host_ + " does not read the messages sent to it");
  }
  if (!stop_ && !ended_) Fail(host_ + " died");
}

void Control::Handle(const Frame& frame) {
  switch (static_cast<Kind>(frame.kind)) {
    case Kind::kValue:
      return HandleValue(Read<messages::Value>(frame));
    case Kind::kAsk: {
      const auto question = Read<messages::Ask>(frame);
      const Answer answer = listener_.HasBegun({question.ranks, question.stream}, question.run);
      return Send(messages::Status{question.question, answer.begun, answer.doing, answer.awaited});
    }
    case Kind::kFail:
      return Fail(Read<messages::Fail>(frame).message);
    case Kind::kStop: {
      const auto stop = Read<messages::Stop>(frame);
      return listener_.OnInterrupt(stop.epoch, stop.call, stop.message);
    }
    case Kind::kRenewed: {
      const auto renewed = Read<messages::Renewed>(frame);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        wanted_.clear();
        values_.clear();  // they are addresses of connections that will be replaced
      }
      return listener_.OnRenewed(renewed.epoch, renewed.message);
    }
    case Kind::kGoodbye:
      Read<messages::Goodbye>(frame);
      ended_ = true;
      return;
    default:
      throw ProtocolError("no message from a hub to a rank is of kind " +
                          std::to_string(frame.kind));
  }
}

void Control::HandleValue(messages::Value value) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (wanted_.erase(value.key) == 0) return;  // not requested, or in an earlier epoch
  values_[value.key] = std::move(value.value);
  changed_.notify_all();
}

void Control::Fail(const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failure_ = reason;
    changed_.notify_all();
  }
  listener_.OnFailure(reason);
}

void Control::StopHub() {
  if (hub_) hub_->Stop();
}

void Control::Set(const std::string& key, const std::string& value) {
  Send(messages::Set{key, value});
}

std::string Control::Get(const std::string& key) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (values_.count(key) == 0) {
    wanted_.insert(key);
    connection_.Send(messages::Get{key});
    const bool found = changed_.wait_for(
        lock, timeout_, [&] { return values_.count(key) > 0 || !failure_.empty(); });
    if (!failure_.empty()) throw std::runtime_error(failure_);
    if (!found) throw std::runtime_error(WhyMissing(key));
  }
  return values_[key];
}

/// Returns the error for a value that no rank has set in time. The key ends with "/" and the rank
/// that should have set it.
std::string Control::WhyMissing(const std::string& key) const {
  return "rank " + key.substr(key.rfind('/') + 1) + " has not sent '" + key + "' to rank " +
         std::to_string(scope_.rank) + " on host " + HostName() + " within " +
         std::to_string(timeout_.count()) + " ms, through " + host_ +
         ", which serves the control channel";
}

void Control::ThrowIfFailed() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.empty()) throw std::runtime_error(failure_);
}

}  // namespace onnxpar
