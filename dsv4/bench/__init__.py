"""``python -m dsv4.bench``: is it right on this machine, and how fast is it."""
