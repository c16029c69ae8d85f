"""The report of a run, report.html with its curves, and the model card.

`run_page` puts the report together; `summarization`, `glue` and `clm` have each task's part of it.
"""
