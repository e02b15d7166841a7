"""Results as text and JSON. Decides how things look; computes nothing about checkpoints."""
