"""Training scripts as functions: `summarization.main`, `glue.main`, `clm.main`; see docs/architecture.md."""
