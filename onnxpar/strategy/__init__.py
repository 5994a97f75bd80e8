"""Requests for the layouts of nodes and tensors: strategy files, annotations, presets, and programs
that are written by hand."""
