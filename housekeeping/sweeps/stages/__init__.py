"""Stages of a run and the SQL of a batch. Start with `stage` (protocol), then `table_stage`.

`actions` writes the ``DELETE`` or ``UPDATE``, and `batch_statement` adds the query that picks and locks the rows.
"""
