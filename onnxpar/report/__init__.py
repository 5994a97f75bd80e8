"""Reports: tables and pages of plans, comparisons of plans with traces, and of sharded with unsplit
results."""
