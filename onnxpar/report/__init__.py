"""Reports: tables and pages of plans, comparisons with traces, and of sharded results with those of
unsplit models."""
