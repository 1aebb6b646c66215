"""Which token follows a prefix: parameters, processors, seeded noise, stop strings, grammars."""
