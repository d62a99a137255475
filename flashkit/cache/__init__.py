"""Key/value caches in pages: the table (pages.py), the steps that layers share (steps.py), a layer (layer.py) and the
cache (kv_cache.py).
"""
