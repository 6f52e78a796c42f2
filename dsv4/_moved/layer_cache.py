"""See ``dsv4.kv_cache.layer_cache``."""

from dsv4._moved import moved

moved("dsv4.layer_cache", "dsv4.kv_cache.layer_cache")
