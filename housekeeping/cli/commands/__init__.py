"""Commands, one module each. `run` starts a worker, `status` and `runs` show results, `pause` sets overrides."""
