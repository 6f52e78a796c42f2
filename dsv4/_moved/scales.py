"""See ``dsv4.quant.scales``."""

from dsv4._moved import moved

moved("dsv4.scales", "dsv4.quant.scales")
