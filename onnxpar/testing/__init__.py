"""Tests of sharding rules and gradient rules, for people who write such rules: `proof.py` and
`gradient_proof.py` compare a rule with onnxruntime and with numerical differences."""
