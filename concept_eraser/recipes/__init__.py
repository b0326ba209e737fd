"""Recipes: the description of a job as data, its schema, its checks and its defaults."""
