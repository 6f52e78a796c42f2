"""See ``dsv4.quant.fragments``."""

from dsv4._moved import moved

moved("dsv4.fragments", "dsv4.quant.fragments")
