"""Strategies: files, annotations, and what they ask of nodes and tensors."""
