"""Models of other libraries on this package's layers. ``import dsv4`` imports nothing of this."""
