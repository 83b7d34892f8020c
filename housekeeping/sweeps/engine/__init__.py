"""Execution of one run. Start with `runner` (phases of a run), then `executor` (its batches)."""
