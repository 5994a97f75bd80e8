// Streams: a rank runs the collectives of one stream one after the other, and those of different
// streams at the same time.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "background.h"
#include "ort.h"
#include "transport.h"

namespace onnxpar {

/// The ranks that run a collective together (the members), as one of them knows them, and the
/// stream in which they run it. `me` is this rank's index in `ranks`.
struct Group {
  std::vector<int> ranks;
  uint64_t stream = 0;
  int me = 0;
  uint64_t hash = 0;
  uint64_t runs = 0;  // collectives begun in this epoch; guarded by World::mutex_
};

/// A collective that this rank wants to run: what the members must agree on, and texts for errors.
struct Operation {
  const std::string& name;     // e.g. AllReduce 'node' (tag 3)
  const std::string& details;  // e.g. axis=0, sizes=[2, 3]
  Group& group;
  uint64_t signature;  // the same on members that agree
  DataType type;
  const Shape& shape;
  /// The numbers of elements that this member sends to and receives from each member; null unless
  /// they may differ between members.
  const std::vector<int64_t>* sends;
  const std::vector<int64_t>* receives;

  std::string Describe() const;
};

/// One stream of this rank. It has its own connections and its own thread, so that its collectives
/// never wait for those of another stream.
struct Stream {
  std::mutex run_mutex;  // held by the collective that runs; taken before World::mutex_

  // World::mutex_ guards these. A thread that writes `transport` also holds run_mutex.
  std::shared_ptr<Transport> transport;  // null with one rank, and after Close
  const Operation* running = nullptr;
  std::chrono::steady_clock::time_point began;
  bool reported = false;

  Background background;  // the last member: its jobs use the others
};

/// Waits until all background jobs in these streams have ended. Returns the locks of the streams:
/// nothing runs in them while the caller keeps the locks.
std::vector<std::unique_lock<std::mutex>> Stopped(const std::vector<Stream*>& streams);

}  // namespace onnxpar
