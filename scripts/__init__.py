"""Programs of a release: its tag and notes, installations in clean environments."""
