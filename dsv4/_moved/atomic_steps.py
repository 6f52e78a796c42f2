"""See ``dsv4.kv_cache.atomic_steps``."""

from dsv4._moved import moved

moved("dsv4.atomic_steps", "dsv4.kv_cache.atomic_steps")
