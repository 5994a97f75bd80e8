"""Factors of a whole graph, and the state of their sharding during the decision."""
