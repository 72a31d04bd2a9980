"""The command line: composition and presentation, nothing else.

The only package that reads the environment. `table.py` and the `rows_*.py` modules declare every command in
both spellings; `main.py` runs one; the `do_*.py` modules are the handlers, imported only when called.
"""
