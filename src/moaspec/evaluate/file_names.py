"""Names of the files with results, and of the place for them in another file."""

REPORT, COSTS, CUT, PAGE = "report.json", "costs.json", "cut.json", "report.html"

BEGIN, END = "<!-- results -->", "<!-- /results -->"
"""In a file with these two lines only what is between them is written anew."""
