"""The parts of ``dsv4.checkpoint``: files, names, tensor groups, filling, layouts."""
