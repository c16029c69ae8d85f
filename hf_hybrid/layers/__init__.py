"""Layers from the literature or shared by architectures; they take plain numbers, no config."""
