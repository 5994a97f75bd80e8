"""The cost model: topologies, the time of communication, memory traffic and compute, and how a
machine is measured."""
