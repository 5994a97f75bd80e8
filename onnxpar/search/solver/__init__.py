"""Solvers of the search: exact elimination, lower bounds by message passing, pruning, and column
generation for limits on memory."""
