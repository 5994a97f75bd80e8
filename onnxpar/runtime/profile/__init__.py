"""Profiles of runs: records of each rank, merged into one trace."""
