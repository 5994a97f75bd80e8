// Gloo's connection between two ranks, on top of an existing connection.
#pragma once

#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>

#include <memory>
#include <vector>

#include "tcp_socket.h"

namespace onnxpar {

/// Gloo's connection to one other rank, whose bytes go through a TcpSocket that is connected
/// already, so that they are encrypted if the socket is.
///
/// Gloo itself accepts whoever connects first, trusts the sizes in received messages, and its own
/// TLS transport blocks when both ends write more than sockets hold. So connections are made
/// elsewhere (mesh_connections.h), and this class reads and writes. It closes the connection if a
/// message arrives for which no receive was posted, or which has another size than the receive.
class SecurePair : public gloo::transport::tcp::Pair {
 public:
  SecurePair(gloo::transport::tcp::Context* context, gloo::transport::tcp::Device* device, int rank,
             TcpSocket socket);
  ~SecurePair() override;

  /// Hands the socket's descriptor to Gloo's event loop, and begins to read.
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

/// Gloo's connections of one rank to all others.
class SecureContext : public gloo::transport::tcp::Context {
 public:
  /// `sockets[r]` is the connection to rank r; that of `rank` itself is not used.
  SecureContext(std::shared_ptr<gloo::transport::tcp::Device> device, int rank,
                std::vector<TcpSocket> sockets);
};

}  // namespace onnxpar
