"""What the traffic is: samples, sketches, windows, and real requests kept for replay. Pure values, no I/O."""
