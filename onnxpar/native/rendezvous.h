// Rendezvous: how the ranks of a world find its hub.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hub.h"
#include "wire.h"

namespace onnxpar {

struct HubAddress {
  std::vector<Address> addresses;  // of one hub; some ranks may not reach all of them
  std::string key;
};

class Rendezvous {
 public:
  /// Parses a store: "hash:NAME", "file:/dir", "job:NAME", "pmix:" or "tcp://host:port". Throws for
  /// any other text. The hub listens on `bind_address`, the address or the name of an interface,
  /// unless the store names an address; if `bind_address` is empty, it listens on all interfaces.
  static std::unique_ptr<Rendezvous> Open(const std::string& store,
                                          const std::string& bind_address);
  virtual ~Rendezvous() = default;

  /// Starts the hub in this process; called on rank 0. Returns null if the address belongs to
  /// another process or host.
  virtual std::shared_ptr<Hub> Serve() = 0;
  /// Returns the address of the hub, if it is already known.
  virtual std::optional<HubAddress> Find() = 0;
  /// Removes the entry that Serve made for other ranks.
  virtual void Withdraw() {}
};

}  // namespace onnxpar
