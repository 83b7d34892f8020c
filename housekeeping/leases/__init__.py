"""Exclusive leases: Redis decides who may begin, and a fencing token in PostgreSQL decides who may commit.

Start with `lease`: the public `ExclusiveLease`, its fencing tokens, and the lease of the current message. `renewal`
keeps leases in Redis and renews them in the background.
"""
