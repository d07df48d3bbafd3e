"""Datasets read from parquet files."""
