"""Command line. Start with `main`; `commands` has one module per command.

`foreground` runs work that Ctrl-C stops within a second.
"""
