"""Reshards of a tensor from one layout to another: shortest paths in a graph of factor
shardings."""
