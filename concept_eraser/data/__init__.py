"""Prompt sets, images, and the batches made of them."""
