"""What people read of a plan: tables, pages, charts, comparisons with traces."""
