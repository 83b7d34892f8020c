"""What a run does with rows that fail, and with errors that end it. Start with `batch_bisection`."""
