// Gloo's connection between two ranks, on top of an existing connection.
#pragma once

#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>

#include <memory>
#include <vector>

#include "tcp_socket.h"

namespace onnxpar {

/// A pair of Gloo's TCP transport whose bytes go through a TcpSocket, so that they are encrypted if
/// the socket is.
///
/// Gloo accepts whoever connects first, trusts the sizes in received messages, and blocks in its
/// own TLS transport, where both ends may write more than sockets hold. So connections are made
/// elsewhere, and this class reads and writes: it closes the connection if no receive was posted
/// for a message, or if the message has another size than the receive.
class SecurePair : public gloo::transport::tcp::Pair {
 public:
  SecurePair(gloo::transport::tcp::Context* context, gloo::transport::tcp::Device* device, int rank,
             TcpSocket socket);
  ~SecurePair() override;

  /// Begins to read.
  void Open();

 protected:
  bool read() override;
  bool write(gloo::transport::tcp::Op& op) override;
  void changeState(state next) noexcept override;

 private:
  bool Check();
  ssize_t Next(void* data, size_t bytes);

  TcpSocket socket_;
};

/// The pairs of one rank.
class SecureContext : public gloo::transport::tcp::Context {
 public:
  /// `sockets` has one connection for each other rank.
  SecureContext(std::shared_ptr<gloo::transport::tcp::Device> device, int rank,
                std::vector<TcpSocket> sockets);
};

}  // namespace onnxpar
