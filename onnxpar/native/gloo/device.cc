// Replaces Gloo's file of this name: a device that runs Gloo's loop, and neither listens nor
// connects. Connections are made by onnxpar/native/mesh_connections.cc.
#include "gloo/transport/tcp/device.h"

#include <atomic>
#include <stdexcept>

#include "gloo/transport/tcp/context.h"

namespace gloo {
namespace transport {
namespace tcp {

Device::Device(const struct attr& attr) : attr_(attr), loop_(std::make_shared<Loop>()) {}

Device::~Device() {}

std::string Device::str() const { return "tcp"; }

const std::string& Device::getPCIBusID() const { return pciBusID_; }

int Device::getInterfaceSpeed() const { return 0; }

std::shared_ptr<transport::Context> Device::createContext(int rank, int size) {
  return std::make_shared<tcp::Context>(shared_from_this(), rank, size);
}

void Device::registerDescriptor(int fd, int events, Handler* handler) {
  loop_->registerDescriptor(fd, events, handler);
}

void Device::unregisterDescriptor(int fd, Handler* handler) {
  loop_->unregisterDescriptor(fd, handler);
}

Address Device::nextAddress() { return Address(attr_.ai_addr); }

void Device::connect(const Address&, const Address&, std::chrono::milliseconds,
                     connect_callback_t) {
  throw std::logic_error("this device does not connect");
}

}  // namespace tcp
}  // namespace transport
}  // namespace gloo
