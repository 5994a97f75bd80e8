// The values by which ranks find each other.
#pragma once

#include <string>

namespace onnxpar {

/// Values that each rank of a world can set and get.
class Store {
 public:
  virtual ~Store() = default;
  virtual void Set(const std::string& key, const std::string& value) = 0;
  /// Waits until a rank has set the value. Throws std::runtime_error if no rank sets it in time, or
  /// if the world fails.
  virtual std::string Get(const std::string& key) = 0;
  /// Throws std::runtime_error with the reason if the world has failed.
  virtual void ThrowIfFailed() = 0;
};

}  // namespace onnxpar
