"""See ``dsv4.kv_cache.page_tables``."""

from dsv4._moved import moved

moved("dsv4.page_tables", "dsv4.kv_cache.page_tables")
