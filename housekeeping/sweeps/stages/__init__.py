"""Stages of a run and the SQL of a batch. Start with `stage` (protocol), then `table_stage`.

`table_rows` has the query that picks rows, `actions` writes the ``DELETE`` or ``UPDATE``, and `batch_statement` joins
both and locks the rows.
"""
