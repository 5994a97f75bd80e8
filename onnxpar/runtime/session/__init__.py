"""Sessions: a sharded model's folder, its inputs and outputs, and runs."""
