"""Manual programs: models of one rank, with collectives inserted by hand."""
