// Exchanges values between the processes of one job through their launcher, by the standard PMIx.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

namespace onnxpar {

/// This process's connection to the launcher that started it, such as mpirun of Open MPI.
class Pmix {
 public:
  /// Connects. Throws std::runtime_error if no launcher with PMIx started this process, or if
  /// PMIx's library is missing.
  Pmix();
  /// Closes the connection; without this, the launcher takes the end of the process for a failure.
  ~Pmix();
  Pmix(const Pmix&) = delete;
  Pmix& operator=(const Pmix&) = delete;

  void Publish(const std::string& key, const std::string& value);
  /// Returns the value that rank `rank` of this job has published under `key`; none if it has not
  /// published it within `patience`.
  std::optional<std::string> Find(uint32_t rank, const std::string& key,
                                  std::chrono::seconds patience) const;

 private:
  struct Functions;
  std::unique_ptr<Functions> functions_;
  std::string job_;
};

}  // namespace onnxpar
