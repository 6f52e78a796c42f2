"""See ``dsv4.serving.sampling``."""

from dsv4._moved import moved

moved("dsv4.sampling", "dsv4.serving.sampling")
