#include "stream.h"

#include <stdexcept>
#include <utility>

#include "message_transport.h"
#include "world.h"

namespace onnxpar {
namespace {

using gloo::rendezvous::Store;
using std::chrono::milliseconds;

/// The part of the store in which the ranks find each other for one stream.
class StreamStore : public Store {
 public:
  StreamStore(Store& store, size_t stream)
      : store_(store), prefix_("stream " + std::to_string(stream) + "/") {}

  void set(const std::string& key, const std::vector<char>& data) override {
    store_.set(prefix_ + key, data);
  }
  std::vector<char> get(const std::string& key) override { return store_.get(prefix_ + key); }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) store_.wait({prefix_ + key});
  }
  void wait(const std::vector<std::string>& keys, const milliseconds&) override { wait(keys); }

 private:
  Store& store_;
  const std::string prefix_;
};

}  // namespace

std::string Operation::Describe() const {
  return name + " over ranks " + ToText(group.ranks) + " on " + TypeName(type) + ToText(shape) +
         (details.empty() ? "" : " with ") + details;
}

std::vector<std::unique_lock<std::mutex>> Stopped(const std::vector<Stream*>& streams) {
  for (Stream* stream : streams) stream->background.Await();
  std::vector<std::unique_lock<std::mutex>> held;
  for (Stream* stream : streams) held.emplace_back(stream->run_mutex);
  return held;
}

std::shared_ptr<Transport> World::NewTransport(Control& control, size_t stream) {
  StreamStore store(control, stream);
  return Slowed(
      ConnectRanks(config_.rank, config_.size, store, config_.bind_address, config_.timeout),
      link_);
}

void World::OpenStreams(size_t count) {
  if (count > kMaxStreams) {
    throw std::runtime_error("a world has at most " + std::to_string(kMaxStreams) + " streams");
  }
  const std::shared_ptr<Control> control = Channel();
  for (size_t next = Streams().size(); next < count; ++next) {
    auto stream = std::make_unique<Stream>();
    if (control) stream->transport = NewTransport(*control, next);
    std::lock_guard<std::mutex> lock(mutex_);
    if (control && !failure_.empty()) stream->transport->Abort();
    streams_.push_back(std::move(stream));
  }
}

Stream& World::StreamOf(const Group& group) {
  std::lock_guard<std::mutex> lock(mutex_);
  return *streams_[group.stream % streams_.size()];
}

std::vector<Stream*> World::Streams() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Stream*> streams;
  for (const auto& stream : streams_) streams.push_back(stream.get());
  return streams;
}

}  // namespace onnxpar
