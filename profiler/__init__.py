"""What the traffic is: samples, sketches, windows, real requests for replay.

Pure values, no I/O, no clock of its own.
"""
