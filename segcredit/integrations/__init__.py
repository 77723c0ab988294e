"""Other people's engines, running on our credit."""
