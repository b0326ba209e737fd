"""Labelled sets by name: a file holds one, as PLUGIN with its options and a `load(split)`."""
