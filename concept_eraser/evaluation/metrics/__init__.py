"""One number, one file."""
