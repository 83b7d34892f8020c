"""The command line. Start reading in `main`; each command has a module in `commands`."""
