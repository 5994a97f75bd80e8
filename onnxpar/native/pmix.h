// Values that processes of one job exchange through their launcher, by PMIx.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

namespace onnxpar {

/// The connection of this process to a launcher that speaks PMIx, such as mpirun of Open MPI.
class Pmix {
 public:
  /// Throws std::runtime_error if this process was not started so, or without PMIx's library.
  Pmix();
  /// The launcher would take the end of a process that still has a connection for a failure.
  ~Pmix();
  Pmix(const Pmix&) = delete;
  Pmix& operator=(const Pmix&) = delete;

  void Publish(const std::string& key, const std::string& value);
  /// Returns what a rank of this job has published; none if it has not within `patience`, in
  /// seconds.
  std::optional<std::string> Find(uint32_t rank, const std::string& key,
                                  std::chrono::seconds patience) const;

 private:
  struct Functions;
  std::unique_ptr<Functions> functions_;
  std::string job_;
};

}  // namespace onnxpar
