// How the ranks of one host find each other, and pass each other their segments (see
// shared_segment.h).
#pragma once

#include <sched.h>

#include <chrono>
#include <vector>

#include "local_socket.h"
#include "shared_segment.h"
#include "store.h"

namespace onnxpar {

/// The ranks with which this rank has exchanged segments, so that they share memory.
struct LocalRanks {
  std::vector<Segment> segments;     // by rank; not mapped for this rank and for ranks elsewhere
  std::vector<LocalSocket> sockets;  // by rank; the other end closes when its rank ends
  int count = 1;                     // including this rank
  bool everyone = true;              // all pairs of ranks of the world have exchanged segments
  std::vector<int> hosts;            // by rank: ranks with one number have all exchanged segments
  cpu_set_t cores;                   // the cores on which any local rank may run
};

/// Passes this rank's segment `own` to each rank of the world that it can reach by a Unix socket,
/// and maps the segments of these ranks. Both ranks of a pair come to the same result. All ranks
/// must call it; a rank for which `offered` is false shares no memory. Throws if a rank does not
/// take part within `timeout`, or if a rank that is reached passes no segment.
LocalRanks MeetLocalRanks(int rank, int size, Store& store, const Segment& own, bool offered,
                          std::chrono::milliseconds timeout);

}  // namespace onnxpar
