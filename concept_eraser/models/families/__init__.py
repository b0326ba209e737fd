"""One file for each supported family of models."""
