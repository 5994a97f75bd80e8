"""States that ranks keep from run to run (an output that is an input of the next run), and tables
that stay in files."""
