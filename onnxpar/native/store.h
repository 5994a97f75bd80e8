// A table of keys and values that the ranks of a world share while they connect.
#pragma once

#include <string>

namespace onnxpar {

/// Values that each rank of a world can set, and all ranks can get, such as the addresses by which
/// they reach each other.
class Store {
 public:
  virtual ~Store() = default;
  virtual void Set(const std::string& key, const std::string& value) = 0;
  /// Waits until a rank has set the value of `key`, and returns it. Throws std::runtime_error if no
  /// rank sets it in time, or if the world fails.
  virtual std::string Get(const std::string& key) = 0;
  /// Throws std::runtime_error with the reason if the world has failed.
  virtual void ThrowIfFailed() = 0;
};

}  // namespace onnxpar
