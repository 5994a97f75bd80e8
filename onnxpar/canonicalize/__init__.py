"""Rewrites of the loader: functions, branches, sequences, old opsets, quirks of exporters."""
