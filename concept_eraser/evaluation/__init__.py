"""Measuring what a model still knows. It never sees how a model was made, so it judges anyone's checkpoint."""
