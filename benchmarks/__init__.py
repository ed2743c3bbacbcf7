"""Measurements of flowfabric beside a raw-SQL floor and beside its peers. Run with `python -m benchmarks`."""
