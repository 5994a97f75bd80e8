"""Modules that know nothing of models: errors, arrays, units, texts, signals, and files and folders
that appear complete or not at all."""
