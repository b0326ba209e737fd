"""One file for each family of models that can be erased from."""
