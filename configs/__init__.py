"""Configuration: schema, sections and yaml files."""
