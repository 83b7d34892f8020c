"""Soaks: so many messages that whatever grows with their number shows; run by ``pytest tests/soak`` only."""
