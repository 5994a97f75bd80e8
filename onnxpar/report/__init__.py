"""Reports on a plan: tables, pages, charts, comparisons with traces."""
