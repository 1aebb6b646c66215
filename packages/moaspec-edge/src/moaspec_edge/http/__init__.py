"""HTTP on a device: its text source, and the page that drafts in browsers."""
