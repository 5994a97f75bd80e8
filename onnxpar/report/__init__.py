"""Reports: text and HTML pages of plans, comparisons of plans with traces, and of sharded with
unsplit results."""
