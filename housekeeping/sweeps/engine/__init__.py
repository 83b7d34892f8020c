"""Execution of one run. Start with `runner` (phases of a run), then `executor` (its batches).

`one_round_trip` commits a batch by a single statement. Batches that need a transaction use `Executor.commit`.
`run_watch` makes a run wait between its batches, or ends it. `run_row` writes counts and cursor to the ledger.
"""
