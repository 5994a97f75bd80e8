"""Profiles and traces of runs."""
