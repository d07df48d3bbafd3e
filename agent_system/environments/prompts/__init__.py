"""Prompt templates, one module per environment."""
