"""For people who write rules and gradients: oracles, proofs, simulated ranks."""
