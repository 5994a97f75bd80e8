"""Meshes and layouts: which elements of a tensor each rank holds, also at open sizes, in closed
form."""
