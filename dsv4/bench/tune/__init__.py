"""``python -m dsv4.bench tune``: measure plans of kernels and write them to a data file."""
