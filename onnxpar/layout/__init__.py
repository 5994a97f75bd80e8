"""Meshes and layouts: which elements of a tensor each rank holds."""
