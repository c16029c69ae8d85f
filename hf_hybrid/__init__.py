"""Long-sequence hybrid architectures for Transformers."""
