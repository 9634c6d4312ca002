"""Ground floor: what several rooms need. Imports no other room, only the configuration and the model."""
