"""The figures of a report, each drawn from what its record keeps."""
