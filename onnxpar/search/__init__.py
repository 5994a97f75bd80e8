"""Costs and strategies."""
