"""General modules that do not depend on models: arrays, units, texts, signals. Every package may
import them."""
