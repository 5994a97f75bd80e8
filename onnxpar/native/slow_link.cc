#include "slow_link.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace onnxpar {

class SlowLink {
 public:
  using Clock = std::chrono::steady_clock;

  double latency = 0;    // seconds of a round of messages
  double bandwidth = 0;  // bytes per second; 0: no limit
  int ranks_per_host = 1;

  /// Adds bytes to those that the link is to send. Returns the time at which it will have sent
  /// them.
  Clock::time_point Send(double bytes) {
    const std::chrono::duration<double> seconds(bandwidth > 0 ? bytes / bandwidth : 0);
    std::lock_guard<std::mutex> lock(mutex_);
    free_ = std::max(free_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(seconds);
    return free_;
  }

 private:
  std::mutex mutex_;
  Clock::time_point free_;
};

namespace {

const char kVariable[] = "ONNXPAR_LINK";

[[noreturn]] void Refuse(const std::string& text, const std::string& part) {
  throw std::runtime_error(std::string(kVariable) + "='" + text + "': '" + part +
                           "' is not understood; write latency=100us,bandwidth=1GB/s, and "
                           "ranks_per_host=4 where several ranks are on one simulated host");
}

/// Returns the number in `value`, e.g. "100us", in the base unit; `units` has the factor of each
/// unit. Throws an error about `part` of `text` if it is not a positive number with one of the
/// units.
double Quantity(const std::string& text, const std::string& part, const std::string& value,
                const std::vector<std::pair<const char*, double>>& units) {
  char* end = nullptr;
  const double number = std::strtod(value.c_str(), &end);
  std::string unit = end;
  unit.erase(0, unit.find_first_not_of(' '));
  for (const auto& [name, factor] : units) {
    if (unit == name && end != value.c_str() && number > 0 && number < 1e15) return number * factor;
  }
  Refuse(text, part);
}

void Parse(const std::string& text, SlowLink& link) {
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    begin = end + 1;
    const size_t equals = std::min(part.find('='), part.size());
    const std::string key = part.substr(0, equals);
    const std::string value = equals < part.size() ? part.substr(equals + 1) : "";
    if (key == "latency") {
      link.latency = Quantity(text, part, value, {{"us", 1e-6}, {"ms", 1e-3}, {"s", 1}});
    } else if (key == "bandwidth") {
      link.bandwidth =
          Quantity(text, part, value, {{"GB/s", 1e9}, {"MB/s", 1e6}, {"kB/s", 1e3}, {"B/s", 1}});
    } else if (key == "ranks_per_host") {
      link.ranks_per_host = static_cast<int>(std::min(Quantity(text, part, value, {{"", 1}}), 1e6));
      if (link.ranks_per_host < 1) Refuse(text, part);
    } else {
      Refuse(text, part);
    }
  }
}

class SlowedTransport : public Transport {
 public:
  SlowedTransport(std::unique_ptr<Transport> transport, std::shared_ptr<SlowLink> link)
      : transport_(std::move(transport)), link_(std::move(link)) {}

  void AllReduce(const Call& call, const Reduction& reduction, const void* in, void* out,
                 size_t elements) override {
    transport_->AllReduce(call, reduction, in, out, elements);
    Delay();
  }

  void ReduceScatter(const Call& call, const Reduction& reduction, const void* in,
                     const std::vector<Block>& blocks, void* out) override {
    transport_->ReduceScatter(call, reduction, in, blocks, out);
    Delay();
  }

  void AllGather(const Call& call, const void* in, void* out,
                 const std::vector<Block>& blocks) override {
    transport_->AllGather(call, in, out, blocks);
    Delay();
  }

  void Broadcast(const Call& call, int root, void* data, size_t bytes) override {
    transport_->Broadcast(call, root, data, bytes);
    Delay();
  }

  void Exchange(const Call& call, const void* in, const std::vector<Block>& sends, void* out,
                const std::vector<Block>& receives) override {
    transport_->Exchange(call, in, sends, out, receives);
    Delay();
  }

  void Abort() override {
    transport_->Abort();
    std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }

  bool SharesMemoryWith(int rank) const override { return transport_->SharesMemoryWith(rank); }
  Crossing LastCrossing() const override { return transport_->LastCrossing(); }
  int Awaited() const override { return transport_->Awaited(); }

 private:
  void Delay() {
    const Crossing crossing = transport_->LastCrossing();
    if (crossing.rounds == 0) return;
    const std::chrono::duration<double> latency(crossing.rounds * link_->latency);
    const auto until = link_->Send(static_cast<double>(crossing.bytes)) + latency;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_until(lock, until, [&] { return aborted_; });
    if (aborted_) throw TransportError("the other ranks, because the world has failed");
  }

  const std::unique_ptr<Transport> transport_;
  const std::shared_ptr<SlowLink> link_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool aborted_ = false;
};

}  // namespace

std::shared_ptr<SlowLink> SlowLinkFromEnvironment() {
  const char* const text = std::getenv(kVariable);
  if (text == nullptr || *text == '\0') return nullptr;
  auto link = std::make_shared<SlowLink>();
  Parse(text, *link);
  return link;
}

std::vector<int> SimulatedHosts(const SlowLink* link, int size) {
  std::vector<int> hosts;
  for (int rank = 0; link != nullptr && rank < size; ++rank) {
    hosts.push_back(rank / link->ranks_per_host);
  }
  return hosts;
}

std::unique_ptr<Transport> Slowed(std::unique_ptr<Transport> transport,
                                  std::shared_ptr<SlowLink> link) {
  if (!link) return transport;
  return std::make_unique<SlowedTransport>(std::move(transport), std::move(link));
}

}  // namespace onnxpar
