"""Lowers the nodes of the global graph to the nodes of a rank: attributes of shards, halos,
collectives, buckets, and weights."""
