"""Stages of a run and the SQL of a batch. Start with `stage` (protocol), then `table_stage`."""
