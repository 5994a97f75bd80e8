"""Open sizes in closed form: polynomials, quotients, and how they are found from samples."""
