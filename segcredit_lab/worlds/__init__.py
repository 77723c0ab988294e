"""Worlds for experiments; ``segcredit.data.worlds`` names them for recipes."""
