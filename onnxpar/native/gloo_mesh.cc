#include "gloo_mesh.h"

#include <gloo/transport/tcp/device.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <exception>
#include <iostream>
#include <mutex>
#include <thread>

#include "transport.h"

namespace onnxpar {
namespace {

/// Creates Gloo's device on a thread whose settings Gloo's event loop inherits. With SCHED_BATCH,
/// the loop's busy polling does not starve the thread that it should wake (otherwise stalls of 4 ms
/// on few cores). Signals are blocked, because they belong to the host program.
std::shared_ptr<gloo::transport::Device> CreateDevice(const std::string& address) {
  std::shared_ptr<gloo::transport::Device> device;
  std::exception_ptr error;
  std::thread([&] {
    sched_param parameters{};
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &parameters);
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    try {
      device = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(address.c_str()));
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
  return device;
}

/// Adds the number of the other rank to Gloo's errors.
template <typename Body>
void NameRank(int rank, const Body& body) {
  try {
    body();
  } catch (const gloo::Exception& error) {
    throw TransportError("rank " + std::to_string(rank) + " (" + error.what() + ")");
  }
}

/// Silences std::cerr of the process while it exists, because Gloo of 2025 logs every connection
/// there. Failures are still exceptions.
class Quiet {
 public:
  Quiet() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (alive_++ == 0) kept_ = std::cerr.rdbuf(nullptr);
  }
  ~Quiet() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--alive_ == 0) std::cerr.rdbuf(kept_);
  }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  static inline std::mutex mutex_;
  static inline int alive_ = 0;
  static inline std::streambuf* kept_ = nullptr;
};

using Device = std::shared_ptr<gloo::transport::Device>;
using gloo::rendezvous::Store;

/// Connects all ranks, for versions of Gloo until 2024, which take a reference to the store.
template <typename Context>
auto Connect(Context& context, Store& store, Device& device, int)
    -> decltype(context.connectFullMesh(store, device)) {
  context.connectFullMesh(store, device);
}

/// Connects all ranks, for later versions of Gloo, which take a shared pointer to the store. They
/// use it only during this call, because the device does not connect lazily.
template <typename Context>
void Connect(Context& context, Store& store, Device& device, long) {
  context.connectFullMesh(std::shared_ptr<Store>(std::shared_ptr<void>(), &store), device);
}

}  // namespace

GlooMesh::GlooMesh(int rank, int size, gloo::rendezvous::Store& store, const std::string& address,
                   std::chrono::milliseconds timeout)
    : device_(CreateDevice(address)), timeout_(timeout) {
  context_ = std::make_shared<gloo::rendezvous::Context>(rank, size);
  // Gloo waits for a connection five times as long as its timeout.
  context_->setTimeout(std::max(timeout / 5, std::chrono::milliseconds(100)));
  const Quiet quiet;
  Connect(*context_, store, device_, 0);
}

GlooMesh::Flight::Flight(GlooMesh& mesh, const std::vector<Message>& sends,
                         const std::vector<Message>& receives)
    : mesh_(mesh) {
  posted_.reserve(sends.size() + receives.size());
  for (const Message& message : receives) Post(message, /*outgoing=*/false);
  for (const Message& message : sends) Post(message, /*outgoing=*/true);
  std::lock_guard<std::mutex> lock(mesh_.mutex_);
  if (mesh_.aborted_) throw TransportError("aborted");
  mesh_.flights_.push_back(this);
}

GlooMesh::Flight::~Flight() {
  std::lock_guard<std::mutex> lock(mesh_.mutex_);
  mesh_.flights_.remove(this);
}

void GlooMesh::Flight::Post(const Message& message, bool outgoing) {
  auto buffer = mesh_.context_->createUnboundBuffer(message.data, message.bytes);
  NameRank(message.rank, [&] {
    if (outgoing) {
      buffer->send(message.rank, message.slot, 0, message.bytes);
    } else {
      buffer->recv(message.rank, message.slot, 0, message.bytes);
    }
  });
  posted_.push_back({message.rank, outgoing, std::move(buffer)});
}

void GlooMesh::Flight::Wait() {
  for (const Posted& message : posted_) {
    NameRank(message.rank, [&] {
      const bool complete = message.outgoing ? message.buffer->waitSend(mesh_.timeout_)
                                             : message.buffer->waitRecv(mesh_.timeout_);
      if (!complete) throw TransportError("aborted");
    });
  }
}

void GlooMesh::Abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  for (Flight* flight : flights_) {
    for (auto& message : flight->posted_) {
      message.buffer->abortWaitRecv();
      message.buffer->abortWaitSend();
    }
  }
}

}  // namespace onnxpar
