"""The cost model: topologies, and the time of communication, memory traffic and compute."""
