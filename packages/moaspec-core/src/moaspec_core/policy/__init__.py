"""How many tokens to draft: policies and the cost model that they go by."""
