"""The mathematics, as pure functions of tensors: no configuration, no logging, no models."""
