"""Benchmarks against named peers."""
