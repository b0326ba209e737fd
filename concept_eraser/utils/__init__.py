"""Helpers of all other parts: errors, limits, progress, provenance, processes, data files."""
