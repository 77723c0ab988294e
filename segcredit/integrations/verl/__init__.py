"""SAPO (segment-aligned) and its baselines as a plugin of verl's V1 trainer."""
