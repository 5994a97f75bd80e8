"""Measures a machine, and fits a `Topology` to the measurements."""
