"""See ``dsv4.kv_cache.pages``."""

from dsv4._moved import moved

moved("dsv4.pages", "dsv4.kv_cache.pages")
