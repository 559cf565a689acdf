"""The wire: `.proto` files and the code generated beside them. `python -m protos` regenerates it.

File names keep the `sidecar_` prefix: they are global to the process, and a clash is fatal at
import.
"""
