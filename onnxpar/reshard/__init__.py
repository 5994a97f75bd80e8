"""How a tensor gets from one layout to another: a graph of placements, and paths through it."""
