"""Factors of a whole graph, and the state of their sharding while it is decided."""
