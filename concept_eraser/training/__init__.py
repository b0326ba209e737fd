"""The one training loop: closure, engine, parameter selection, checkpoints, log."""
