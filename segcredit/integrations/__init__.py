"""Integrations with other training frameworks."""
