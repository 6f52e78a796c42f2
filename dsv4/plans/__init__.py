"""Record what a call launches and allocates, and repeat it."""
