// How the ranks of a world find its hub.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "hub.h"
#include "wire.h"

namespace onnxpar {

struct HubAddress {
  Address address;
  std::string key;  // that the hub expects in a hello
};

class Rendezvous {
 public:
  /// Reads "hash:NAME", "file:/dir" or "tcp://host:port"; throws on anything else.
  static std::unique_ptr<Rendezvous> Open(const std::string& store,
                                          const std::string& bind_address);
  virtual ~Rendezvous() = default;

  /// Starts the hub on behalf of rank 0; null if another process has to serve, or still serves.
  virtual std::shared_ptr<Hub> Serve() = 0;
  /// The address of the hub, if it is known yet.
  virtual std::optional<HubAddress> Find() = 0;
  /// Removes the files that Serve wrote for other ranks.
  virtual void Withdraw() {}
};

}  // namespace onnxpar
