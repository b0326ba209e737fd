"""Labelled data sets by name.

Each file holds one, as PLUGIN with its options and a `load(split)`.
"""
