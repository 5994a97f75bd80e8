"""Factors of a whole graph, the state of their sharding during the decision, and the cheapest
collectives from one layout to another."""
