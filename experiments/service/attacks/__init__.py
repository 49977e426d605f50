"""Attacks on a service beside a calm client. In: forms of attack. Out: times, rows and memory, relative to polite clients."""
