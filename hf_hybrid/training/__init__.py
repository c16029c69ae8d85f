"""Training scripts as functions: `summarization.main`, `glue.main`, `clm.main`; docs/architecture.md has the rooms."""
