"""`check`: compares sharded results with those of the unsplit model."""
