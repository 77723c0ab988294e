"""The laboratory: studies, analyses, worlds for experiments, and generated result pages."""
