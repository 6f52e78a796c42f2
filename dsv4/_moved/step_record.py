"""See ``dsv4.kv_cache.step_record``."""

from dsv4._moved import moved

moved("dsv4.step_record", "dsv4.kv_cache.step_record")
