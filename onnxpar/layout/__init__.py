"""Meshes and layouts: which elements of a tensor each rank holds. Sizes may be open (symbols), and
then have closed forms."""
