"""Generators of the parts of the reference that come from the code. `docs.generate` lists them."""
