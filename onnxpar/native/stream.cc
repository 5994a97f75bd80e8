#include "stream.h"

#include <stdexcept>
#include <utility>

#include "message_transport.h"
#include "world.h"

namespace onnxpar {
namespace {

/// The part of a store for one stream: adds the stream's number to each key, so that the
/// connections of different streams do not mix.
class StreamStore : public Store {
 public:
  StreamStore(Store& store, size_t stream)
      : store_(store), prefix_("stream " + std::to_string(stream) + "/") {}

  void Set(const std::string& key, const std::string& value) override {
    store_.Set(prefix_ + key, value);
  }
  std::string Get(const std::string& key) override { return store_.Get(prefix_ + key); }
  void ThrowIfFailed() override { store_.ThrowIfFailed(); }

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
  return Slowed(ConnectRanks(config_.rank, config_.size, store, control.network(), config_.timeout,
                             SimulatedHosts(link_.get(), config_.size)),
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
