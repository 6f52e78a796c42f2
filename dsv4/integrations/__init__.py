"""Other libraries' models on this package's layers. Nothing here is imported by ``import dsv4``."""
