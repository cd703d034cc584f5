"""Programs of a release: tag and notes, installations in clean environments, kernels for a hub."""
