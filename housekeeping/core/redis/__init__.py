"""Clients of Redis, of one server or behind Sentinel. Start reading in `client`."""
