"""Oracles, proofs and simulated ranks, for people who write rules and gradients."""
