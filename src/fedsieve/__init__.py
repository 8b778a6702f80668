"""Federated learning that survives wrong labels and says which labels are wrong."""

__version__ = "0.1.0"
