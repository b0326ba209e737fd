"""Adversarial attacks on erased models, one file each."""
