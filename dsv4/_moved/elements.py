"""See ``dsv4.quant.elements``."""

from dsv4._moved import moved

moved("dsv4.elements", "dsv4.quant.elements")
