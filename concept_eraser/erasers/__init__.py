"""The erasers: which part of a model is trained, and how the losses are computed."""
