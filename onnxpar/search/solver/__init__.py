"""Solvers of the search: elimination, message passing, pruning, column generation."""
