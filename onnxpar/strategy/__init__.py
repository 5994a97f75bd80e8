"""Strategies: files and annotations, and the layouts that they request for nodes and tensors."""
