"""Reference implementation of every operator, in plain PyTorch: the oracle of every test."""
