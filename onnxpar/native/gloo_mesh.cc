#include "gloo_mesh.h"

#include <gloo/transport/tcp/device.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "block.h"
#include "secure_pair.h"
#include "transport.h"

namespace onnxpar {
namespace {

using gloo::transport::tcp::Device;

/// The least size in bytes of a part, if a message is cut to travel over several connections.
constexpr size_t kLeastPart = 64 << 10;
constexpr int kMostConnections = 16;

/// Creates Gloo's device, and so the thread of its event loop, which inherits the settings of the
/// thread that creates it. Therefore this happens in a thread with two settings. With SCHED_BATCH,
/// the loop's busy polling does not starve the thread that it should wake (otherwise stalls of 4 ms
/// on few cores). Signals are blocked, because they belong to the host program.
std::shared_ptr<Device> CreateDevice() {
  std::shared_ptr<Device> device;
  std::exception_ptr error;
  std::thread([&] {
    sched_param parameters{};
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &parameters);
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    try {
      device = std::make_shared<Device>(gloo::transport::tcp::attr());
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
  return device;
}

/// Returns a message of Gloo without its prefix "[file:line] ", a place in Gloo's source.
std::string WithoutPlace(const std::string& text) {
  const size_t end = text.find("] ");
  return text.empty() || text[0] != '[' || end == std::string::npos ? text : text.substr(end + 2);
}

/// Calls `body`, and turns an exception of Gloo into a TransportError that names the other rank.
template <typename Body>
void NameRank(int rank, const Body& body) {
  try {
    body();
  } catch (const gloo::Exception& error) {
    throw TransportError("rank " + std::to_string(rank) + " (" + WithoutPlace(error.what()) + ")");
  }
}

}  // namespace

int ConnectionsFromEnvironment() {
  const char* const value = std::getenv("ONNXPAR_CONNECTIONS");
  const std::string text = value == nullptr ? "" : value;
  if (text.empty()) return 1;
  const bool digits = text.size() <= 2 && text.find_first_not_of("0123456789") == std::string::npos;
  const int count = digits ? std::atoi(text.c_str()) : 0;
  if (count >= 1 && count <= kMostConnections) return count;
  throw std::runtime_error("ONNXPAR_CONNECTIONS='" + text + "' must be a number from 1 to " +
                           std::to_string(kMostConnections));
}

GlooMesh::GlooMesh(int rank, int size, Store& store, const Network& network,
                   std::chrono::milliseconds timeout)
    : timeout_(timeout) {
  const int count = ConnectionsFromEnvironment();
  PeerSockets sockets = ConnectPeers(rank, size, count, store, network, timeout);
  for (int number = 0; number < count; ++number) {
    std::vector<TcpSocket> each(static_cast<size_t>(size));
    for (int other = 0; other < size; ++other) {
      if (other != rank) each[other] = std::move(sockets[other][number]);
    }
    contexts_.push_back(std::make_shared<SecureContext>(CreateDevice(), rank, std::move(each)));
  }
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

/// Starts to send or receive a message, in parts over the connections to its rank. Both ends
/// compute the same parts from the message's size.
void GlooMesh::Flight::Post(const Message& message, bool outgoing) {
  const size_t count = std::clamp<size_t>(message.bytes / kLeastPart, 1, mesh_.contexts_.size());
  for (size_t i = 0; i < count; ++i) {
    const Range range = PartOf(message.bytes, count, i);
    char* const begin = static_cast<char*>(message.data) + range.begin;
    PostPart(*mesh_.contexts_[i], {message.rank, message.slot, begin, range.size}, outgoing);
  }
}

void GlooMesh::Flight::PostPart(gloo::transport::Context& connections, const Message& part,
                                bool outgoing) {
  auto buffer = connections.createUnboundBuffer(part.data, part.bytes);
  NameRank(part.rank, [&] {
    if (outgoing) {
      buffer->send(part.rank, part.slot, 0, part.bytes);
    } else {
      buffer->recv(part.rank, part.slot, 0, part.bytes);
    }
  });
  posted_.push_back({part.rank, outgoing, std::move(buffer)});
}

void GlooMesh::Flight::Wait() {
  for (const Posted& message : posted_) {
    mesh_.awaited_ = message.rank;
    NameRank(message.rank, [&] {
      const bool complete = message.outgoing ? message.buffer->waitSend(mesh_.timeout_)
                                             : message.buffer->waitRecv(mesh_.timeout_);
      if (!complete) throw TransportError("aborted");
    });
  }
  mesh_.awaited_ = -1;
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
