"""Factors of a whole graph, the state of their sharding while it is decided, and the shortest path
of collectives from one layout to another."""
