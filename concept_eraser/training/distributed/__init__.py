"""What is split among several processes: optimizer state and frozen weights."""
