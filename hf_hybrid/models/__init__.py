"""One folder per architecture, and the table that registers them."""
