"""Tables: their form in a terminal, and those of reports and plans."""
