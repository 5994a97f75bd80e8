// Each rank listens on a Unix socket with a random name, which it publishes in the store of the
// world, and connects to the sockets of all lower ranks. If it can connect, the other rank is on
// this host: this says more than names of hosts and addresses, for instance in containers.
#include "shared_handshake.h"

#include <poll.h>
#include <unistd.h>

#include <cstring>
#include <list>
#include <stdexcept>
#include <string>
#include <utility>

#include "key.h"

namespace onnxpar {
namespace {

using Clock = LocalSocket::Clock;
using std::chrono::milliseconds;

/// How long an accepted connection may take to send its Hello.
constexpr milliseconds kHelloTime{1000};
/// The most connections that have not sent a Hello yet; a further one replaces the oldest.
constexpr size_t kMaxAsking = 128;
constexpr milliseconds kTick{100};

/// The message by which one rank passes another the descriptor of its segment.
struct Hello {
  char key[32];  // the receiver's key, from the store: strangers do not know it
  uint32_t rank;
  cpu_set_t cores;
};

struct Asking {
  LocalSocket socket;
  Clock::time_point until;  // deadline for its Hello
};

/// Returns the number of each rank's host. `reached[r][o]` is '+' if rank r can connect to the
/// lower rank o. A rank joins the first host of whose ranks it reaches all; it may reach only some
/// ranks of a host, and is then not on that host.
std::vector<int> HostsOf(const std::vector<std::string>& reached) {
  std::vector<int> hosts;
  for (const std::string& theirs : reached) {
    const auto fits = [&](int host) {
      for (size_t other = 0; other < hosts.size(); ++other) {
        if (hosts[other] == host && theirs.at(other) != '+') return false;
      }
      return true;
    };
    int host = 0;
    while (!fits(host)) ++host;
    hosts.push_back(host);
  }
  return hosts;
}

/// One rank's exchange of segments with the other ranks of its host; Run does it.
class Meeting {
 public:
  Meeting(int rank, int size, Store& store, const Segment& own, milliseconds timeout)
      : rank_(rank), size_(size), store_(store), own_(own), until_(Clock::now() + timeout) {
    CPU_ZERO(&cores_);
    sched_getaffinity(0, sizeof(cores_), &cores_);
    found_.cores = cores_;
    found_.segments.resize(size);
    found_.sockets.resize(size);
    keys_.resize(size);
  }

  LocalRanks Run(bool offered) {
    const std::string name = offered ? "onnxpar-" + RandomKey() : "";
    const LocalSocket listener = offered ? LocalSocket::Listen(name) : LocalSocket();
    store_.Set("memory/" + std::to_string(rank_), key_ + name);
    std::string reached(rank_, '-');  // by lower rank; + if this rank can connect to it
    for (int other = 0; other < size_; ++other) {
      if (other == rank_) continue;
      const std::string value = store_.Get("memory/" + std::to_string(other));
      keys_[other] = value.substr(0, sizeof(Hello::key));
      const std::string theirs = value.substr(keys_[other].size());
      if (other < rank_ && offered && !theirs.empty() && Ask(other, theirs)) reached[other] = '+';
    }
    store_.Set("memory/reached/" + std::to_string(rank_), reached);
    int expected = 0;
    std::vector<std::string> all;
    for (int other = 0; other < size_; ++other) {
      all.push_back(other == rank_ ? reached
                                   : store_.Get("memory/reached/" + std::to_string(other)));
      if (other > rank_) expected += all.back().at(rank_) == '+';
      found_.everyone = found_.everyone && all.back().find('-') == std::string::npos;
    }
    found_.hosts = HostsOf(all);
    AnswerAll(listener, expected);
    for (int other = 0; other < rank_; ++other) {
      Hello hello{};
      if (reached[other] != '+') continue;
      const int passed = found_.sockets[other].Receive(&hello, sizeof(hello), until_);
      Take(other, passed, hello);
    }
    return std::move(found_);
  }

 private:
  /// Connects to a lower rank's socket and passes it this rank's segment; AnswerAll on that rank
  /// answers. Returns false if that rank is on another host.
  bool Ask(int other, const std::string& name) {
    LocalSocket socket = LocalSocket::Connect(name);
    if (!socket.open()) return false;
    SendHello(socket, other);
    found_.sockets[other] = std::move(socket);
    return true;
  }

  /// Waits until `expected` higher ranks have asked, and passes each of them this rank's segment.
  /// Drops the connections of other processes, which cannot delay the ranks.
  void AnswerAll(const LocalSocket& listener, int expected) {
    std::list<Asking> asking;  // oldest first
    while (expected > 0) {
      if (Clock::now() >= until_) {
        throw std::runtime_error("a rank of this host has not passed its shared memory in time");
      }
      std::vector<pollfd> waiting = {{listener.descriptor(), POLLIN, 0}};
      for (const Asking& each : asking) waiting.push_back({each.socket.descriptor(), POLLIN, 0});
      poll(waiting.data(), waiting.size(), static_cast<int>(kTick.count()));
      const pollfd* ready = waiting.data();
      for (auto each = asking.begin(); each != asking.end();) {
        const bool asks = (++ready)->revents != 0;
        if (asks && Answer(each->socket)) --expected;
        each = asks || Clock::now() >= each->until ? asking.erase(each) : std::next(each);
      }
      if (waiting[0].revents == 0) continue;
      if (asking.size() >= kMaxAsking) asking.pop_front();
      LocalSocket socket = listener.Accept();
      if (socket.open()) asking.push_back({std::move(socket), Clock::now() + kHelloTime});
    }
  }

  /// Maps the segment of a higher rank that has asked, and passes it this rank's segment. Returns
  /// false if the process that asked is not such a rank.
  bool Answer(LocalSocket& socket) {
    Hello hello{};
    const int passed = socket.Receive(&hello, sizeof(hello), Clock::now());
    const auto other = static_cast<int>(hello.rank);
    const bool known =
        Proves(hello) && rank_ < other && other < size_ && !found_.segments[other].mapped();
    if (passed < 0 || !known) {
      if (passed >= 0) close(passed);
      return false;
    }
    Take(other, passed, hello);
    SendHello(socket, other);
    found_.sockets[other] = std::move(socket);
    return true;
  }

  void Take(int other, int descriptor, const Hello& hello) {
    const std::string name = "rank " + std::to_string(other);
    if (descriptor < 0) {
      throw std::runtime_error(name + " of this host has not passed its shared memory in time");
    }
    if (!Proves(hello)) {
      close(descriptor);
      throw std::runtime_error("no rank of this world answers for " + name);
    }
    try {
      found_.segments[other] = Segment::Map(descriptor, size_, own_.area_bytes());
    } catch (const std::exception& error) {
      throw std::runtime_error("no shared memory with " + name + ": " + error.what());
    }
    ++found_.count;
    CPU_OR(&found_.cores, &found_.cores, &hello.cores);
  }

  bool Proves(const Hello& hello) const { return SameKey({hello.key, sizeof(hello.key)}, key_); }

  void SendHello(const LocalSocket& socket, int other) const {
    Hello hello{};
    keys_[other].copy(hello.key, sizeof(hello.key));
    hello.rank = static_cast<uint32_t>(rank_);
    hello.cores = cores_;
    socket.Send(&hello, sizeof(hello), own_.descriptor());
  }

  const int rank_;
  const int size_;
  Store& store_;
  const Segment& own_;
  const Clock::time_point until_;
  const std::string key_ = RandomKey();
  cpu_set_t cores_;
  std::vector<std::string> keys_;  // of the others, by rank
  LocalRanks found_;
};

}  // namespace

LocalRanks MeetLocalRanks(int rank, int size, Store& store, const Segment& own, bool offered,
                          milliseconds timeout) {
  return Meeting(rank, size, store, own, timeout).Run(offered);
}

}  // namespace onnxpar
