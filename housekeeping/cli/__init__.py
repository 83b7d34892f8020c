"""Command line. Start with `main`, which names the command of each other module."""
