// Rendezvous: how the ranks of a world find its hub, from the text that a user gives as the store.
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
  /// Returns the rendezvous for a store: "hash:NAME" (ranks that are threads of one process),
  /// "file:/dir", "job:NAME", "pmix:" or "tcp://host:port". Throws for any other text.
  ///
  /// Unless the store names an address, the hub listens on `bind_address`, an address or the name
  /// of a network interface; if it is empty, on all interfaces.
  static std::unique_ptr<Rendezvous> Open(const std::string& store,
                                          const std::string& bind_address);
  virtual ~Rendezvous() = default;

  /// Starts the hub in this process, and makes its address known to other ranks; called on rank 0.
  /// Returns null if the store names an address of another process or host, which then serves the
  /// hub.
  virtual std::shared_ptr<Hub> Serve() = 0;
  /// Returns the addresses and the key of the hub; none if they are not known yet.
  virtual std::optional<HubAddress> Find() = 0;
  /// Removes what Serve published for other ranks; called once all have joined, or when joining
  /// fails.
  virtual void Withdraw() {}
};

}  // namespace onnxpar
