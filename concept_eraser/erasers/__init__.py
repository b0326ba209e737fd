"""Which part of a model is trained, and how its two losses are asked."""
