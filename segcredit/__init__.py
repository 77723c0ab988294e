"""segcredit: reinforcement learning whose unit of credit is the reasoning step."""

__version__ = "0.1.0"
