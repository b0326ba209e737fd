"""Image features, by which two sets of images are compared."""
