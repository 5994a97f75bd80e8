"""Rewrites that the loader applies to a model before all passes: of functions, branches, sequences,
old opsets, and quirks of exporters."""
