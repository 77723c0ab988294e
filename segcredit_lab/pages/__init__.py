"""Generators of the documentation's result pages and pictures."""
