"""Factors of a whole graph (the parts of dimensions that can be split), the mesh axes over which
each factor is split, and the cheapest collectives from one layout of a tensor to another."""
