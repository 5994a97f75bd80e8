"""Lowers global nodes to a rank's nodes: local attributes, halos, collectives, buckets, weights."""
