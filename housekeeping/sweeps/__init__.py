"""What a sweep is: its declaration, its stages, and the SQL of a batch.

Start with `declaration` (`Sweep`), then `rows` (`Rows`) and `conditions` (`Row`, which predicates get). `keyset` and
`table_stage` have the SQL of a batch, `partitions` the dropping of partitions, `validate_tables` the checks of tables.
The public names are those of `housekeeping`.
"""
