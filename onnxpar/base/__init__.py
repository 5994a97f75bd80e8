"""Modules that know nothing of models, for every room: arrays, units, text, interrupts."""
