"""Sweeps for tables with ages per tenant, UUID keys, and times that may be NULL."""
