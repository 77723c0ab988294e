"""The mathematics: pure functions of tensors, without configuration, logging or models."""
