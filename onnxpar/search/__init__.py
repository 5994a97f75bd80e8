"""The search for the fastest strategy by the cost model."""
