"""Ground floor: what several rooms need. Imports no other room, only the configuration and the
model."""

__version__ = "0.1.0"
