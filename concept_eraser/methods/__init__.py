"""How two gradients become one step. One file, one paper; discovered by file name."""
