"""File names of results, and the markers of their place in a Markdown file."""

REPORT, COSTS, CUT, PAGE = "report.json", "costs.json", "cut.json", "report.html"

BEGIN, END = "<!-- results -->", "<!-- /results -->"
"""If a file has both lines, only the text between them is replaced."""
