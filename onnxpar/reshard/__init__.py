"""Reshards of a tensor from one layout to another: shortest paths between factor shardings."""
