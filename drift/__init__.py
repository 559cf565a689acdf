"""Has the traffic changed enough to matter? Pure: profiles in, verdicts out; time is an argument."""
