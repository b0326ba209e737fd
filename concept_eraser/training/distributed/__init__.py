"""Splitting the optimizer's state and frozen weights among several processes."""
