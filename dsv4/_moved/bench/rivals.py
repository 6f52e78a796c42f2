"""See ``dsv4.bench.baselines``."""

from dsv4._moved import moved

moved("dsv4.bench.rivals", "dsv4.bench.baselines")
