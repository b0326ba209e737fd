"""One job from start to end: the run folder, the dry run, the memory estimate, the measurement."""
