"""Other servers: their texts, judged and compared."""
