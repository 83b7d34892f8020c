"""Exclusive leases: Redis decides who may begin, and a fencing token in PostgreSQL decides who may commit.

Start with `lease`, the public `ExclusiveLease`, and `current`, the one of the current message. `store` keeps leases in
Redis, `renewal` renews them in the background by its threads (`renewal_threads`),
`fencing` issues and checks the fencing tokens (epochs), `holder_epoch` decides when a holder gets one, and
`lease_token` describes the holder.
"""
