"""Checkpoints: strict reading, and per family the map from our tensor names to the checkpoint's."""
