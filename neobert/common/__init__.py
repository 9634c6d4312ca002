"""Code that several commands share. Imports no other room, only the configuration of the model."""

__version__ = "0.1.0"
