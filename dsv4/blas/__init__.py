"""GEMMs by libraries that torch ships."""
