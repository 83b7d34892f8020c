"""One-off purge: a run that deletes the rows of one table that match a WHERE, without a declaration.

Start at `sweep.sweep_of`: it makes a `Sweep` of a `PurgeRequest`, and the engine runs it like any other. The request is
stored in the run's row, so that a later run can resume it. `plan` previews the run, with its index and its statement.
"""
