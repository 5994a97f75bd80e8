"""Passes from global nodes with layouts to the nodes and collectives of ranks."""
