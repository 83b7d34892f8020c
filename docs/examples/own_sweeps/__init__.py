"""Sweeps for tables with an age per tenant, UUID keys, and nullable times."""
