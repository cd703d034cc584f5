"""The benchmark of the token scatter."""
