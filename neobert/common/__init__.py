"""Code that several commands share. Of the package, it only imports the model's configuration."""

__version__ = "0.1.0"
