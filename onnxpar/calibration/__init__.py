"""Measures a machine, and writes its `Topology`."""
