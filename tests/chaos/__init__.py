"""Real processes and real servers under every fault that can be made; run by ``pytest tests/chaos``."""
