"""Measurements beside named peers."""
