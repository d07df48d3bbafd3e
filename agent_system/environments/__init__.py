"""Environments an agent acts in: the contract, the registry, the managers and their engines."""
