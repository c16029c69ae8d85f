"""The program ``hf-hybrid``: from a checkpoint to answers, on documents of any kind.

`program` has the list of commands. For those that answer, `flags` has their flags, `documents` what their arguments
name, `readers` the text of a file, `checkpoint` the model, `answers` what it says of a text, and `results` the output.
`app` serves the page: `reading` writes while somebody looks on, `attended` computes what the model looked at, and
`page` has the HTML.
"""
