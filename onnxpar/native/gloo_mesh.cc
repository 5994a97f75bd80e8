#include "gloo_mesh.h"

#include <gloo/transport/tcp/device.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <exception>
#include <stdexcept>
#include <thread>

namespace onnxpar {
namespace {

/// Creates Gloo's device on a thread whose settings its event loop inherits: SCHED_BATCH, since the
/// loop's busy polling otherwise starves the thread that it should wake (stalls of 4 ms on few
/// cores), and no signals, which are the host program's.
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

}  // namespace

GlooMesh::GlooMesh(int rank, int size, gloo::rendezvous::Store& store, const std::string& address,
                   std::chrono::milliseconds timeout)
    : device_(CreateDevice(address)), timeout_(timeout) {
  context_ = std::make_shared<gloo::rendezvous::Context>(rank, size);
  // Gloo waits five times as long for a connection.
  context_->setTimeout(std::max(timeout / 5, std::chrono::milliseconds(100)));
  context_->connectFullMesh(store, device_);
}

GlooMesh::Flight::Flight(GlooMesh& mesh, const std::vector<Message>& sends,
                         const std::vector<Message>& receives)
    : mesh_(mesh) {
  for (const Message& message : receives) {
    receives_.push_back(mesh.context_->createUnboundBuffer(message.data, message.bytes));
    receives_.back()->recv(message.rank, message.slot, 0, message.bytes);
  }
  for (const Message& message : sends) {
    sends_.push_back(mesh.context_->createUnboundBuffer(message.data, message.bytes));
    sends_.back()->send(message.rank, message.slot, 0, message.bytes);
  }
  std::lock_guard<std::mutex> lock(mesh_.mutex_);
  if (mesh_.aborted_) throw std::runtime_error("aborted");
  mesh_.flights_.push_back(this);
}

GlooMesh::Flight::~Flight() {
  std::lock_guard<std::mutex> lock(mesh_.mutex_);
  mesh_.flights_.remove(this);
}

void GlooMesh::Flight::Wait() {
  const auto check = [](bool arrived) {
    if (!arrived) throw std::runtime_error("aborted");
  };
  for (auto& buffer : receives_) check(buffer->waitRecv(mesh_.timeout_));
  for (auto& buffer : sends_) check(buffer->waitSend(mesh_.timeout_));
}

void GlooMesh::Abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  for (Flight* flight : flights_) {
    for (auto& buffer : flight->receives_) buffer->abortWaitRecv();
    for (auto& buffer : flight->sends_) buffer->abortWaitSend();
  }
}

}  // namespace onnxpar
