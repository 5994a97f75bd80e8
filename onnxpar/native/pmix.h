// Exchanges values between the processes of one job through their launcher, by PMIx.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

namespace onnxpar {

/// The connection of this process to a launcher that speaks PMIx, such as mpirun of Open MPI.
class Pmix {
 public:
  /// Throws std::runtime_error if no launcher with PMIx started this process, or if PMIx's library
  /// is missing.
  Pmix();
  /// Closes the connection: otherwise the launcher would take the end of the process for a failure.
  ~Pmix();
  Pmix(const Pmix&) = delete;
  Pmix& operator=(const Pmix&) = delete;

  void Publish(const std::string& key, const std::string& value);
  /// Returns a value that a rank of this job has published; none if the rank has not published it
  /// within `patience` seconds.
  std::optional<std::string> Find(uint32_t rank, const std::string& key,
                                  std::chrono::seconds patience) const;

 private:
  struct Functions;
  std::unique_ptr<Functions> functions_;
  std::string job_;
};

}  // namespace onnxpar
