"""The cost model: topologies (hardware as data); seconds of communication, memory traffic and
compute; and measurements of a machine."""
