"""Attacks on a service: what hostile clients send, and what it does to a calm one."""
