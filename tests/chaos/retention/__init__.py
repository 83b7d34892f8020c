"""Archive, restore, partitions and purge under faults: the application's sweeps, their test data, and operators."""
