"""Training scripts as functions: `summarization.main`, and the steps that every script shares."""
