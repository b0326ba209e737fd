"""Who looks at the pictures."""
