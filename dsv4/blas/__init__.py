"""Products by libraries that torch brings along."""
