"""`check`: sharded results beside those of the unsplit model."""
