"""Programs that are written per rank, with collectives by hand."""
