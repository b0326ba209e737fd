"""Combination rules: how two gradients become one step. Each file is one paper, and its name is the
name of the method.
"""
