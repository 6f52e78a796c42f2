"""See ``dsv4.kv_cache.paged_cache``."""

from dsv4._moved import moved

moved("dsv4.cache", "dsv4.kv_cache.paged_cache")
