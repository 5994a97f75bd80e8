"""What every room may use: arrays, units, text, interrupts. It knows nothing of models."""
