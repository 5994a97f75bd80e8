"""Rewrites of the loader: functions, branches, sequences, old opsets, what exporters left."""
