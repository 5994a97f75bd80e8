"""Measures a machine for `Topology`."""
