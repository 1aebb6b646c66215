"""The device's side: drafts locally, lets the server verify."""
