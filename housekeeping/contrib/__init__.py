"""Integrations with other libraries. Each module requires the library in its name; no other module imports it."""
