"""Models with open sizes, of dimensions that only a run determines: their shapes are inferred for
several sample sizes at the same time."""
