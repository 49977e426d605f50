"""Schema, slices and yaml files of the configuration."""
