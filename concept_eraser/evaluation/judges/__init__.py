"""Judges, which decide whether an image shows a concept."""
