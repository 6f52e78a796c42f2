"""See ``dsv4.quant.formats``."""

from dsv4._moved import moved

moved("dsv4.formats", "dsv4.quant.formats")
