"""The cost model: topologies; the time of communication, memory traffic and compute; and
measurements of a machine."""
