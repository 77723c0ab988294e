"""SAPO (segment-aligned) and its baselines as a plugin for verl's V1 trainer."""
