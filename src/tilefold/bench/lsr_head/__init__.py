"""The benchmark of the LSR head."""
