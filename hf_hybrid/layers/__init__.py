"""Layers named in the literature or used by two architectures; they take plain numbers, no config."""
