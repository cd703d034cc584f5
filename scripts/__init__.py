"""Programs of a release: its tag and notes, installations in clean environments, kernels for a hub."""
