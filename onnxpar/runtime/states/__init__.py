"""States that ranks keep from run to run, and tables that stay in files."""
