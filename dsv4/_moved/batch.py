"""See ``dsv4.kv_cache.batch``."""

from dsv4._moved import moved

moved("dsv4.batch", "dsv4.kv_cache.batch")
