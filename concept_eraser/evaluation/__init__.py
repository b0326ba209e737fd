"""Measure what a model still generates.

The evaluation does not use how a model was made, so it applies to any checkpoint.
"""
