"""Open sizes (of dimensions such as `batch`, which only a run determines) in closed form:
polynomials and quotients, and how these are found from samples."""
