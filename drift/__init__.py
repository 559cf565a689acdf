"""Has the traffic changed enough to matter? Pure: profiles in, verdicts out.

Time is an argument.
"""
