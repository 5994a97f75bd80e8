// Each rank listens while connections are made. A rank connects to all lower ranks, and accepts the
// connections of all higher ranks.
#include "mesh_connections.h"

#include <poll.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "acceptor.h"
#include "key.h"
#include "wire.h"

namespace onnxpar {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// The pause between two attempts to connect to a rank.
constexpr milliseconds kRetry{20};
/// The longest duration of one attempt.
constexpr milliseconds kAttempt{5000};
/// The interval at which to check whether the world has failed.
constexpr milliseconds kTick{100};
/// Time beyond the timeout in which higher ranks, which connect to this one, can report why they
/// could not: they know the reason, this rank does not.
constexpr milliseconds kGrace{500};
constexpr char kSameAsHub[] = "*";

/// Where a rank listens for the connections of higher ranks.
struct Place {
  Address address;
  std::string purpose;  // of handshakes there
  std::string host;     // its name
};

/// Returns a place on this host. Its purpose is random, so it differs from that of any other
/// listening process.
Place PlaceOn(const std::string& listening) {
  Place place;
  place.address.host = listening;
  place.purpose = RandomKey();
  place.host = HostName();
  return place;
}

/// Connection number `number` to rank `rank`, which this rank makes, with as many attempts as it
/// takes.
struct Attempt {
  int rank = 0;
  int number = 0;
  std::optional<Handshake> handshake;
  Clock::time_point next;   // when to begin the next attempt
  Clock::time_point until;  // when to give this one up
  std::string error = "no answer";
};

class Connecting {
 public:
  Connecting(int rank, int size, int count, Store& store, const Network& network,
             milliseconds timeout)
      : rank_(rank),
        size_(size),
        count_(count),
        store_(store),
        network_(network),
        timeout_(timeout),
        until_(Clock::now() + timeout),
        own_(PlaceOn(network.listening)),
        acceptor_(&own_.address, network.credentials, own_.purpose),
        sockets_(size) {
    for (int other = 0; other < size; ++other) {
      if (other != rank) sockets_[other].resize(count);
    }
  }

  PeerSockets Run() {
    Publish();
    for (int other = 0; other < size_; ++other) {
      places_.push_back(other == rank_ ? own_ : PlaceOf(other));
      for (int number = 0; other < rank_ && number < count_; ++number) {
        attempts_.push_back({other, number, {}, {}, {}});
      }
    }
    missing_ = (size_ - 1 - rank_) * count_;
    while (missing_ > 0 || !attempts_.empty()) {
      store_.ThrowIfFailed();
      Begin();
      Wait();
      while (auto accepted = acceptor_.Next()) Take(std::move(*accepted));
      if (!attempts_.empty() && Clock::now() >= until_) ThrowUnreached();
      if (Clock::now() >= until_ + kGrace) ThrowNotReached();
    }
    return std::move(sockets_);
  }

 private:
  void Publish() {
    const bool any = own_.address.host == "0.0.0.0" || own_.address.host == "::";
    std::ostringstream text;
    text << (any ? kSameAsHub : own_.address.host) << " " << own_.address.port << " "
         << own_.purpose << " " << own_.host;
    store_.Set("address/" + std::to_string(rank_), text.str());
  }

  Place PlaceOf(int other) {
    std::istringstream text(store_.Get("address/" + std::to_string(other)));
    Place place;
    if (!(text >> place.address.host >> place.address.port >> place.purpose)) {
      throw std::runtime_error("rank " + std::to_string(other) + " has sent no address");
    }
    text >> place.host;
    if (place.address.host == kSameAsHub) place.address.host = network_.hub.host;
    return place;
  }

  /// Starts each attempt to connect whose time has come.
  void Begin() {
    const auto now = Clock::now();
    for (Attempt& each : attempts_) {
      if (each.handshake || now < each.next) continue;
      const Place& place = places_[each.rank];
      const std::string identity = std::to_string(rank_) + " " + std::to_string(each.number);
      each.handshake = Handshake::Connects(TcpSocket::Connect(place.address), network_.credentials,
                                           place.purpose, identity);
      each.until = now + kAttempt;
      Advance(each);
    }
  }

  void Wait() {
    std::vector<pollfd> waiting;
    for (const Attempt& each : attempts_) {
      waiting.push_back({each.handshake ? each.handshake->descriptor() : -1,
                         each.handshake ? each.handshake->events() : short{0}, 0});
    }
    acceptor_.Watch(&waiting);
    const bool retries = std::any_of(attempts_.begin(), attempts_.end(),
                                     [](const Attempt& each) { return !each.handshake; });
    poll(waiting.data(), waiting.size(), PollTime(retries ? kRetry : kTick));
    for (size_t i = 0; i < attempts_.size(); ++i) {
      if (waiting[i].revents != 0 || Clock::now() >= attempts_[i].until) Advance(attempts_[i]);
    }
    acceptor_.Advance(&waiting[attempts_.size()]);
    attempts_.erase(std::remove_if(attempts_.begin(), attempts_.end(),
                                   [this](const Attempt& each) {
                                     return sockets_[each.rank][each.number].open();
                                   }),
                    attempts_.end());
  }

  void Advance(Attempt& attempt) {
    if (!attempt.handshake) return;
    const auto state = attempt.handshake->Advance();
    if (state == Handshake::State::kDone) {
      sockets_[attempt.rank][attempt.number] = attempt.handshake->Take();
      return;
    }
    if (state == Handshake::State::kUnderWay && Clock::now() < attempt.until) return;
    if (state == Handshake::State::kFailed) attempt.error = attempt.handshake->error();
    attempt.handshake.reset();
    attempt.next = Clock::now() + kRetry;
  }

  /// Stores a connection that a higher rank has made; drops it if its identity is not "rank
  /// number".
  void Take(Accepted accepted) {
    std::istringstream text(accepted.identity);
    int other = 0, number = 0;
    const bool known =
        text >> other >> number && rank_ < other && other < size_ && number >= 0 && number < count_;
    if (!known) return;
    TcpSocket& socket = sockets_[other][number];
    if (!socket.open()) --missing_;
    socket = std::move(accepted.socket);  // a second connection: its rank has given up the first
  }

  [[noreturn]] void ThrowUnreached() const {
    const Attempt& late = attempts_.front();
    Throw(rank_, late.rank, ": " + late.error);
  }

  [[noreturn]] void ThrowNotReached() const {
    for (int other = rank_ + 1; other < size_; ++other) {
      for (const TcpSocket& socket : sockets_[other]) {
        if (!socket.open()) Throw(other, rank_, "");
      }
    }
    throw std::logic_error("no connection is missing");
  }

  [[noreturn]] void Throw(int from, int to, const std::string& why) const {
    throw std::runtime_error(
        Name(from) + " has not reached " + Name(to) + " at " + places_[to].address.Text() +
        " within " + std::to_string(timeout_.count()) + " ms" + why +
        "; check firewalls between the two, or name the interface that reaches it (--interface, "
        "ONNXPAR_BIND)");
  }

  std::string Name(int other) const {
    return "rank " + std::to_string(other) + " on host " + places_[other].host;
  }

  const int rank_, size_, count_;
  Store& store_;
  const Network& network_;
  const milliseconds timeout_;
  const Clock::time_point until_;
  Place own_;
  Acceptor acceptor_;
  std::vector<Place> places_;  // by rank
  std::vector<Attempt> attempts_;
  int missing_ = 0;  // connections that higher ranks have not made yet
  PeerSockets sockets_;
};

}  // namespace

PeerSockets ConnectPeers(int rank, int size, int count, Store& store, const Network& network,
                         milliseconds timeout) {
  return Connecting(rank, size, count, store, network, timeout).Run();
}

}  // namespace onnxpar
