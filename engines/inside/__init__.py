"""What runs inside an engine's own process: standard library, numpy, torch and triton only.

A foreign worker finds it on its path from a folder that holds `engines/__init__.py` and this
package and nothing else, so the import name is the same in both worlds.
"""
