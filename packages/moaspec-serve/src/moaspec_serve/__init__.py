"""HTTP endpoints that existing apps use, and the page."""
