"""What two sets of pictures are compared by."""
