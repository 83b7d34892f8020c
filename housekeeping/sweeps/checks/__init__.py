"""Validation of declarations and of the tables that they name. Start with `validation`."""
