"""The benchmark of MaxSim."""
