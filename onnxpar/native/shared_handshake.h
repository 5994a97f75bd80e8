// How ranks of one host find each other and pass each other their segments.
#pragma once

#include <sched.h>

#include <chrono>
#include <vector>

#include "local_socket.h"
#include "shared_segment.h"
#include "store.h"

namespace onnxpar {

/// The ranks with which this rank has exchanged segments.
struct LocalRanks {
  std::vector<Segment> segments;     // by rank; not mapped for this rank and for ranks elsewhere
  std::vector<LocalSocket> sockets;  // by rank; the other end closes when its rank ends
  int count = 1;                     // with this rank
  bool everyone = true;              // all pairs of ranks of the world have exchanged segments
  std::vector<int> hosts;            // by rank: ranks with one number have all exchanged segments
  cpu_set_t cores;                   // on which any of the local ranks may run
};

/// Passes this rank's segment `own` to every rank of the world that it reaches by a Unix socket,
/// and maps theirs. Both ranks of a pair come to the same result. If `offered` is false, reaches
/// none. All ranks must call it; throws if one does not within `timeout`, or if a rank that was
/// reached passes no segment.
LocalRanks MeetLocalRanks(int rank, int size, Store& store, const Segment& own, bool offered,
                          std::chrono::milliseconds timeout);

}  // namespace onnxpar
