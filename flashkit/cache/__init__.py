"""Key/value caches in pages: the table (pages.py), the cache and its layers (kv_cache.py)."""
