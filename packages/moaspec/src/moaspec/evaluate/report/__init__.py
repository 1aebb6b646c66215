"""Reports of measurements: summary and comparison."""

REPORT = "report.json"  # the file's name in a directory of results
