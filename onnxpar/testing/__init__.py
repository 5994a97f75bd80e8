"""Tests of sharding rules and gradient rules, for people who write such rules."""
