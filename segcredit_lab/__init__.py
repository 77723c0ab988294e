"""The laboratory beside the library: studies, analyses and worlds for experiments."""
